"""Text to token ids and back: no model, no torch, no Ray."""
