"""The client of all groups: routes requests; after the loss of an engine, continues requests."""
