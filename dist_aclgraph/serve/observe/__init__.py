"""Observability: the metrics, the history of the metrics, and the status page."""
