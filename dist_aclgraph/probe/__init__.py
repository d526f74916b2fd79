"""``dist-aclgraph probe``: tests a device by questions, each in its own process, and makes a
report.
"""
