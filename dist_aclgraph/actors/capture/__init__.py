"""Capture in lockstep: one transaction over all ranks of a group, and graphs that change later."""
