"""``dist-aclgraph doctor`` checks each part that a machine needs, and names remedies."""
