"""Graphs on the device: static buffers, recording, replay, and updates of captured attention
operators.
"""
