"""``dist-aclgraph probe``: puts questions to a device, each in its own process, and makes a
report.
"""
