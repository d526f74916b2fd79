"""Model families: what their checkpoints say, and their forward pass."""
