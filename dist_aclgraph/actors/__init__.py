"""The processes of a deployment are Ray actors.

The messages of steps are sent over sockets, never through Ray.
"""
