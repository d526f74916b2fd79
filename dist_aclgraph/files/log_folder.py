"""The folder for the log files that one run of a service writes on this node.

Each process holds a shared lock on a file in its folder until the process ends. When a new folder
is created, old folders whose lock is free are removed. A folder without a lock file belongs to
another program, and is not removed. Under Ray Serve, many processes may use a folder one after the
other. Only the newest files of ended processes stay in the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dist_aclgraph.config import Config, LoggingConfig
from dist_aclgraph.environment import state_directory

LOCK = "processes.lock"
UNNAMED = "unnamed"  # folder of processes that no service has started, for example in tests
PRIVATE = 0o700
MAX_NAME_CHARS = 60
KEPT_FILES = 256  # maximum number of files of ended processes in a folder


def with_log_folder(config: Config, folder: str | None = None) -> Config:
    """Return the configuration with a name for the log folder.

    Args:
        folder: the name to use if the configuration has no name. None means a name that is made
            from the time and the model.
    """
    logging = config.logging
    if logging.folder is not None:
        return config
    folder = folder or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{file_name(config.name)}"
    named = logging.model_copy(update={"folder": folder})
    return config.model_copy(update={"logging": named})


def folder_path(config: LoggingConfig) -> Path:
    """Return the path of a log folder on this node."""
    return _parent(config) / (config.folder or UNNAMED)


def open_folder(config: LoggingConfig) -> tuple[Path, int]:
    """Create the folder if it does not exist, and lock it; return its path and the locked file.

    Raises:
        OSError: the folder cannot be created or locked.
    """
    path = folder_path(config)
    is_new = not path.exists()
    path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if is_new:
            _sweep(path, config.keep_folders)
        _sweep_files(path)
    except BaseException:
        os.close(lock)
        raise
    return path, lock


def _parent(config: LoggingConfig) -> Path:
    if config.directory is not None:
        return Path(config.directory).expanduser()
    return state_directory() / "logs"


def _sweep(new: Path, num_kept: int) -> None:
    """Remove the oldest folders beside ``new``, if no process uses them."""
    others = [path for path in new.parent.iterdir() if path != new and (path / LOCK).is_file()]
    by_age = sorted(others, key=last_change_s, reverse=True)
    for path in by_age[num_kept - 1 :]:
        with suppress(OSError):  # raised if a process has locked or removed the folder
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _sweep_files(folder: Path) -> None:
    """Remove the oldest files of this host's processes that have ended."""
    name = re.compile(rf".+-{re.escape(file_name(socket.gethostname()))}-(\d+)\.log(\.\d+)?")
    ended = [
        path
        for path in folder.iterdir()
        if (found := name.fullmatch(path.name)) and not Path("/proc", found[1]).exists()
    ]
    for path in sorted(ended, key=last_change_s, reverse=True)[KEPT_FILES:]:
        with suppress(OSError):  # raised if another process has removed the file
            path.unlink()


def last_change_s(path: Path) -> float:
    """Return the time of the last change of a file or folder; 0 if ``path`` does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def file_name(text: str) -> str:
    """Return the text with `-` in place of each character that a file name must not contain."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:MAX_NAME_CHARS] or "model"
