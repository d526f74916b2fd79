"""What ``dist-aclgraph doctor`` says of one part of a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        remedy: what to do where it is not ok, or only a warning.
        is_warning: this machine is of use, but not for everything, or not as fast as it could be.
    """

    name: str
    is_ok: bool
    found: str
    remedy: str = ""
    is_warning: bool = False

    @property
    def mark(self) -> str:
        """How the line begins."""
        return "warn" if self.is_warning else "ok  " if self.is_ok else "FIX "
