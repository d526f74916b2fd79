"""Layers of several model families; each layer is split over the tensor parallel group."""
