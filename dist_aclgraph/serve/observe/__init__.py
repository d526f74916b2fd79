"""Observability: metrics, their history, the status page."""
