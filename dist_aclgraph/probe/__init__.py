"""``dist-aclgraph probe`` tests a device with questions, and makes a report.

Each question runs in a separate process.
"""
