"""The work of a worker in a step, and the loop that decides steps."""
