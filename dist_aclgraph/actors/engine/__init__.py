"""The engine of a group is an actor that decides steps, serves clients, and resumes the group."""
