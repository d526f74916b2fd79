"""The rig behind ``make chaos``: faults from a seed against a real service."""
