"""``dist-aclgraph probe``: questions to a device, a process for each, and a report."""
