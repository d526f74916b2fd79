"""The arithmetic of context parallelism: which ranks keep and which ranks compute each token."""
