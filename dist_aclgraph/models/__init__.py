"""Model families: loading their checkpoints, and their forward pass."""
