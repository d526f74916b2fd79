"""Reads the shapes of models from their checkpoints, and computes sizes in bytes. It needs no
torch.
"""
