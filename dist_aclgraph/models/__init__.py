"""Model families: how their checkpoints are loaded, and their forward pass."""
