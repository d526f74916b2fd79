"""Finds, reads and creates files and folders: models, keys, logs and shipped files."""
