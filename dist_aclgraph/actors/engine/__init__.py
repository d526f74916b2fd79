"""The actor of a group's engine: its loop, what it tells clients, and how it resumes."""
