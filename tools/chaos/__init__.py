"""The rig of ``make chaos``: it injects faults, which a seed chooses, into a real service."""
