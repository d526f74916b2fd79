"""The controller: it starts groups, watches them, and changes their number."""
