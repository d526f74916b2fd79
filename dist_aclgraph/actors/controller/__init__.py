"""The controller starts groups, watches groups, and changes the number of groups."""
