"""The worker actor, which runs one rank, and the object that calls all workers of a group."""
