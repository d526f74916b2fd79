"""What the service says of itself: metrics, their history, the status page."""
