"""The rig behind ``make chaos``: faults from a seed against a service that people would start."""
