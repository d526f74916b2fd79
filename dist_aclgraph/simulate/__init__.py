"""Simulates a deployment under a load. The code of a real deployment makes the decisions, but there
are no devices and no Ray.
"""
