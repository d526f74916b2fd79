"""Context parallelism as arithmetic: the owner of each token, and the rank that computes it."""
