"""Chooses tokens from logits on the device, and counts the tokens that penalties need."""
