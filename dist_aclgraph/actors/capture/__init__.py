"""Capture in lockstep: one transaction on all ranks of a group; changes of graphs while serving."""
