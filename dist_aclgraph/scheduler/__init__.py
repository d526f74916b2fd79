"""Decides which requests run in each step, and builds the messages for workers and clients."""
