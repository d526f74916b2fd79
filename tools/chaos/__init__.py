"""The rig of ``make chaos``: it injects faults into a real service. A seed determines the faults."""
