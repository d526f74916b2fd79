"""Helpers for processes on this machine, and the directory of a running service."""
