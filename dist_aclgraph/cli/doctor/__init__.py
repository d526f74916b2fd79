"""``dist-aclgraph doctor`` checks whether a machine can serve models, and prints remedies."""
