"""The worker actor, which runs one rank, and ``WorkerGroup``, which calls a group's workers."""
