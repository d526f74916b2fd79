"""Shapes of models, read from their checkpoints, and the bytes of their parts; without torch."""
