"""What developers run beside the package: the pinned packages, and the rig of ``make chaos``."""
