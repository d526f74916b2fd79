"""Graphs: which sizes are captured, how ranks agree on them, capture, replay and task updates."""
