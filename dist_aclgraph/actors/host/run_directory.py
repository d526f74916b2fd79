"""A directory for socket files. Only this user may enter it.

The path of the directory is short, because the system limits the length of a socket's path. The
process that owns the directory holds a lock in it until the process ends. A stored process id would
not prove that the owner is alive. Several containers can share one temporary folder, and each
container has its own process ids.

While a directory is created or removed, it has a hidden name. There are two reasons why a directory
with a hidden name is not locked: its owner was killed, or its owner is creating the directory at
this moment. ``sweep`` removes the directory in both cases. A process whose new directory was
removed creates another directory.
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
UNFINISHED = f".{PREFIX}"  # while a directory is created or removed, its name has this prefix
LOCK = "owner.lock"
SWEEP_S = 10.0  # seconds between two regular calls of ``sweep``


class RunDirectory:
    """Owns a new directory with mode 0700 in the system's temporary folder, and the lock in this
    directory.

    The constructor first removes the directories of processes that have ended.
    """

    def __init__(self) -> None:
        sweep()
        while not self._make():
            pass  # another process has removed the new directory

    def _make(self) -> bool:
        """Create a directory and lock it; return False if another process removed the directory."""
        new = Path(tempfile.mkdtemp(prefix=UNFINISHED))
        path = new.with_name(new.name.removeprefix("."))
        lock = -1
        try:
            lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The directory gets its name after it is locked, so that no other process removes it.
            os.rename(new, path)
        except FileNotFoundError:
            if lock >= 0:
                os.close(lock)
            return False
        self.path, self._lock = str(path), lock
        return True

    def disown(self) -> None:
        """To be called in a forked process. The parent process stays the owner of the directory."""
        os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Remove the directory and release the lock. Idempotent."""
        _remove(Path(self.path))
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove the directories that still exist although the processes that own them have ended."""
    for path in directories(Path(tempfile.gettempdir())):
        with held_if_free(path) as is_free:
            if is_free:
                _remove(path)


def directories(folder: Path) -> list[Path]:
    """Return the run directories of all processes in a temporary folder, including directories with
    hidden names.
    """
    return [path for prefix in (PREFIX, UNFINISHED) for path in folder.glob(f"{prefix}*")]


def _remove(path: Path) -> None:
    unfinished = path.with_name(f".{path.name.removeprefix('.')}")
    with suppress(FileNotFoundError):
        os.rename(path, unfinished)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Lock a directory within this context. Yield whether the directory could be locked. The
    directory cannot be locked if another user or a living process owns the directory.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    if path.name.startswith(UNFINISHED):
        flags |= os.O_CREAT  # the lock file may not exist yet, or may have been removed
    try:
        is_ours = path.stat().st_uid == os.getuid()
        lock = os.open(path / LOCK, flags, 0o600) if is_ours else -1
    except OSError:  # the directory is another user's, or was just removed
        lock = -1
    if lock < 0:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False  # the owner is alive
    try:
        yield is_free
    finally:
        os.close(lock)
