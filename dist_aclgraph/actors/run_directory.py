"""A private directory for socket files: only this user may enter, and short enough for a socket.

Its owner holds a lock in it for as long as it lives. A process id would not say whether that is so:
several containers may share one temporary folder, and each counts its processes on its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dist-aclgraph-"
LOCK = "owner.lock"


class RunDirectory:
    """Owns a new directory of mode 0700 in the system's temporary folder, and the lock in it.

    Directories whose owners are gone are removed first.
    """

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        # Held before it gets its name: who sweeps must never find it free.
        new = f"{self.path}/new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, f"{self.path}/{LOCK}")

    def disown(self) -> None:
        """Leave it to the parent, in a process that was forked: its life is what counts."""
        os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Give it up. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove the directories of owners that have ended without a chance to."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with held_if_free(path) as is_free:
            if is_free:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Say whether a directory is one of ours whose owner has ended; hold its lock meanwhile."""
    try:
        is_ours = path.stat().st_uid == os.getuid()
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC) if is_ours else -1
    except OSError:  # not one of ours, or one that is just being made
        lock = -1
    if lock < 0:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False  # its owner lives
    try:
        yield is_free
    finally:
        os.close(lock)
