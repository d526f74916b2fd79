"""Stores the report of the last deployment that started on this machine. ``doctor`` reads from this
report the facts that are known only after a start.
"""

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
    """Store the report of a new deployment in place of the previous report. If the report cannot be
    stored, raise no error.

    Args:
        name: name of the served model.
    """
    with suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"name": name, "time_s": time.time(), "report": report}))
        written.replace(path)


def last_start() -> dict[str, Any] | None:
    """Return the name of the model, the time and the report of the last start; None if there is no
    report.
    """
    try:
        kept = json.loads(_path().read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(kept, dict) and {"name", "time_s", "report"} <= kept.keys()
    return kept if is_ours else None
