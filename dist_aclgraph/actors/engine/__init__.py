"""The actor of a group's engine: its loop, its messages to clients, and how it is resumed."""
