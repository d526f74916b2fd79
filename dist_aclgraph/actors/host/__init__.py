"""Processes of this machine, and the folder of a service's run."""
