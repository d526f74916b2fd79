"""The processes of a deployment are Ray actors. Steps are sent over sockets, never through Ray."""
