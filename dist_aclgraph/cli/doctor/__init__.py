"""``dist-aclgraph doctor``: it checks each part that a machine needs, and names remedies."""
