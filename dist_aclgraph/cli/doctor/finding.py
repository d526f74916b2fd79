"""What ``dist-aclgraph doctor`` says of one part of a machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings as lines, or as JSON."""
    if as_json:
        print(json.dumps([finding.__dict__ for finding in findings], indent=2))
        return
    for finding in findings:
        print(f"{finding.mark} {finding.name}: {finding.found}")
        if not finding.is_ok or finding.is_warning:
            print(f"     {finding.remedy}")
