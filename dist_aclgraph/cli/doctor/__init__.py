"""``dist-aclgraph doctor`` checks each part that a machine needs for serving, and prints remedies."""
