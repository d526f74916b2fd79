"""A private directory for socket files: only this user may enter, and short enough for a socket."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "dist-aclgraph-"


def make_run_directory() -> str:
    """Return a new directory of mode 0700 in the system's temporary folder.

    Its name holds this process's id; directories of processes that are gone are removed first.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _owner_is_gone(path):
            remove_run_directory(str(path))
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")


def remove_run_directory(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _owner_is_gone(path: Path) -> bool:
    pid = path.name.removeprefix(PREFIX).partition("-")[0]
    try:
        return path.stat().st_uid == os.getuid() and not Path(f"/proc/{int(pid)}").exists()
    except (OSError, ValueError):
        return False
