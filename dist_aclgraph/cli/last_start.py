"""The report of the last start, for ``doctor``: facts that only a start finds out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_aclgraph.environment import cache_directory


def _path() -> Path:
    return cache_directory() / "last-start.json"


def keep_report(name: str, report: Mapping[str, Any]) -> None:
    """Keep a deployment's report in place of the one before; where that cannot be, go on without.

    Args:
        name: of the model that is served.
    """
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"name": name, "time_s": time.time(), "report": report}))
        written.replace(path)


def last_start() -> dict[str, Any] | None:
    """Return name, time and report of the last start; None where none is known."""
    try:
        kept = json.loads(_path().read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(kept, dict) and {"name", "time_s", "report"} <= kept.keys()
    return kept if is_ours else None
