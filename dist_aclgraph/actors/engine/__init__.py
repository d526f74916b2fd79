"""The actor of a group's engine: loop, messages to clients, resumption of the group."""
