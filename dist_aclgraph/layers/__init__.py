"""Layers that several model families use; each layer is split over the tensor parallel group."""
