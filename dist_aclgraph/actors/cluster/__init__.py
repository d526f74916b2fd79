"""Ray: a local Ray, Ray's errors, and places for groups on Ray's nodes."""
