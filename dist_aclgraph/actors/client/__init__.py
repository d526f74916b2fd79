"""The client of all groups: it routes requests, and has them go on after a loss."""
