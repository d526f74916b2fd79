"""Ray: a local one, its errors, and places for groups on its nodes."""
