"""The actor of one rank, and an object for all ranks of a group."""
