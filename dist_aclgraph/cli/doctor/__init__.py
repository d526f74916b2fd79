"""``dist-aclgraph doctor`` checks the parts that a machine needs to serve, and prints remedies."""
