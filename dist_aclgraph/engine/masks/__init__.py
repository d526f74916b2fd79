"""Computes which tokens a request's output format allows as the next token."""
