"""The rig of ``make chaos``: faults, chosen by a seed, against a real service."""
