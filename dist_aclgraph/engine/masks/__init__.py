"""Computes the tokens that the output formats of requests allow next."""
