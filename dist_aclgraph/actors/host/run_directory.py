"""A private directory for socket files: only this user may enter, and short enough for a socket.

Its owner holds a lock in it while it lives. A process id would not tell whether the owner lives:
several containers may share one temporary folder, and each has its own process ids.

A directory is made and removed under a hidden name. An unlocked directory of this name belongs to a
process that was killed meanwhile, or is just being made: it is swept in both cases, and in the
second case its maker makes another one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "dist-aclgraph-"
UNFINISHED = f".{PREFIX}"  # while a directory is made or removed
LOCK = "owner.lock"


class RunDirectory:
    """Owns a new directory of mode 0700 in the system's temporary folder, and the lock in it.

    Directories whose owners are gone are removed first.
    """

    def __init__(self) -> None:
        sweep()
        while not self._make():
            pass  # it was swept

    def _make(self) -> bool:
        """Make a directory and lock it; return whether it is still there."""
        new = Path(tempfile.mkdtemp(prefix=UNFINISHED))
        path = new.with_name(new.name.removeprefix("."))
        lock = -1
        try:
            lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(new, path)  # it is locked already, so that no process sweeps it
        except FileNotFoundError:
            if lock >= 0:
                os.close(lock)
            return False
        self.path, self._lock = str(path), lock
        return True

    def disown(self) -> None:
        """In a forked process: leave the directory to the parent, whose life counts."""
        os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Give it up. Idempotent."""
        _remove(Path(self.path))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove the directories of owners that have ended without a chance to."""
    for path in directories(Path(tempfile.gettempdir())):
        with held_if_free(path) as is_free:
            if is_free:
                _remove(path)


def directories(folder: Path) -> list[Path]:
    """Return the directories of all owners in a temporary folder, the unfinished ones too."""
    return [path for prefix in (PREFIX, UNFINISHED) for path in folder.glob(f"{prefix}*")]


def _remove(path: Path) -> None:
    unfinished = path.with_name(f".{path.name.removeprefix('.')}")
    with suppress(FileNotFoundError):
        os.rename(path, unfinished)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Say whether a directory is one of ours whose owner has ended; hold its lock meanwhile."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if path.name.startswith(UNFINISHED):
        flags |= os.O_CREAT  # the lock may not exist yet, or be removed already
    try:
        is_ours = path.stat().st_uid == os.getuid()
        lock = os.open(path / LOCK, flags, 0o600) if is_ours else -1
    except OSError:  # not one of ours, or just removed
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
