"""The client of all groups: routes requests, and resumes the requests of a lost engine."""
