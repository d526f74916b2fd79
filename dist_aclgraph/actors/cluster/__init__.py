"""Uses Ray: starts a local Ray, converts Ray's errors, and reserves NPUs on Ray's nodes."""
