"""Tools for developers beside the package: the pinned packages, and the rig of ``make chaos``."""
