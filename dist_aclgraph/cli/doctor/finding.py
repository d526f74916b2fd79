"""The result of ``dist-aclgraph doctor`` for one part of a machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result for one part of the machine.

    Attributes:
        remedy: what the user can do about a fault or a warning.
        is_warning: true if the machine can be used, but has fewer features or is slower.
    """

    name: str
    is_ok: bool
    found: str
    remedy: str = ""
    is_warning: bool = False

    @property
    def mark(self) -> str:
        """The first word of the finding's line: ok, warn or FIX."""
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
