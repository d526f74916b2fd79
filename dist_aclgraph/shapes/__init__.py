"""What models are, read from their checkpoints, and what their parts take; without torch."""
