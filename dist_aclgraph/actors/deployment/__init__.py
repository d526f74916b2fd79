"""Starts a whole deployment, finds a running deployment, and replaces a dead controller."""
