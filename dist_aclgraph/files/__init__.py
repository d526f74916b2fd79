"""Reads and creates this package's files and folders, except its code."""
