"""The actor of one rank, and all ranks of a group as one object."""
