"""What a worker does with a step, and the loop that decides steps."""
