"""The paths of the package's files that are not Python modules: configurations, demo models, the
emulator's sources.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INSIDE = PACKAGE / "shipped"  # the folder of a wheel to which setup.py copies these files


def is_installed() -> bool:
    """Return true in an installation from a wheel, and false in a git clone."""
    return INSIDE.is_dir()


def shipped(name: str) -> Path:
    """Return the path of the folder ``configs``, ``models`` or ``emulator``, or a path in one of
    them.

    In a clone, these folders are beside the package. In a wheel, these folders are inside the
    package.
    """
    return (INSIDE if is_installed() else PACKAGE.parent) / name
