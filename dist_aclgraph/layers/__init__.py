"""Layers that model families share, each split over the tensor parallel group."""
