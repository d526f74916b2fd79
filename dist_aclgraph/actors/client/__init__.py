"""The client of all groups: it routes requests, and continues them after an engine was lost."""
