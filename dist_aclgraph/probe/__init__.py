"""``dist-aclgraph probe``: questions to a device, one process for each, and a report of the answers."""
