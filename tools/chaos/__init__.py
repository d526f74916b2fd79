"""The rig of ``make chaos`` injects faults into a real service. A seed determines the faults."""
