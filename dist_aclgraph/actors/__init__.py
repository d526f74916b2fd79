"""The processes of a deployment, which are Ray actors. A step never passes through Ray."""
