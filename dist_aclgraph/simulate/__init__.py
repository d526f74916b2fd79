"""Simulates a deployment under a load. The decisions are those of a real deployment, but there are
no devices and no Ray.
"""
