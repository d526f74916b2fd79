"""Layers of several model families. Each layer is split over a tensor parallel group."""
