"""Converts text to token ids and token ids to text. No module of this package uses a model, torch
or Ray.
"""
