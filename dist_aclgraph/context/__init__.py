"""The arithmetic of context parallelism: which rank keeps each token, and which rank computes it."""
