"""Capture in lockstep, as one transaction on all ranks; changes of graphs while serving."""
