"""Reads files with secret keys. Other users must not be able to read or change these files."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from dist_aclgraph.errors import ConfigError

# Mode bits that let other users read or change the keys. The file's group may read the keys.
_OPEN_MODES = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def read_key_file(key: str, path: Path, max_bytes: int) -> str:
    """Return the text of a file.

    Args:
        key: the configuration's key that names the file, for error messages.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, has more than ``max_bytes``, or
            is not text; or other users can read or change it.
    """
    try:
        # Without O_NONBLOCK, ``os.open`` of a named pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{key} {path} is not a regular file")
            if state.st_mode & _OPEN_MODES:
                raise ConfigError(
                    f"{key} {path} has mode {stat.S_IMODE(state.st_mode):04o}, so other users can "
                    f"read or change the keys; run: chmod 600 {shlex.quote(str(path))}"
                )
            data = file.read(max_bytes + 1)
    except OSError as e:
        raise unreadable(key, path, e) from e
    if len(data) > max_bytes:
        raise ConfigError(f"{key} {path} exceeds {max_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{key} {path} is not text: {e}") from e


def unreadable(key: str, path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(f"cannot read {key} {path}: {error.strerror}")
