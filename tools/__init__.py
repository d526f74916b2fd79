"""Tools for developers that are not in the package: the list of pinned packages, and the rig of
``make chaos``."""
