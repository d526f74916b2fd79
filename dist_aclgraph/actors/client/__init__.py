"""The client of all groups. It routes requests, and continues the requests of a lost engine."""
