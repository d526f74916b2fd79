"""Graphs on the device: static buffers, recording, replay, updates of attention tasks."""
