"""The controller: it starts groups, watches them, and changes how many there are."""
