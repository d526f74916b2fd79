"""Computes which ranks keep and which ranks compute each token in context parallelism."""
