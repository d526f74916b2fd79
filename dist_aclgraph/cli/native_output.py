"""Keeps the output of native libraries away from the user's terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

STDERR = 2


@contextmanager
def native_output_in(path: Path) -> Iterator[None]:
    """Within this context, native libraries write their stderr to a file.

    For example, Ray's library prints stack traces while the library cannot reach the cluster.
    Python still writes to the terminal. Processes that are started within the context also write to
    the file.

    Raises:
        OSError: the file cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stderr.flush()
    terminal = os.dup(STDERR)
    os.dup2(file, STDERR)
    os.close(file)
    try:
        stream = os.fdopen(terminal, "w", buffering=1, errors="replace", closefd=False)
        with stream, redirect_stderr(stream):
            yield
    finally:
        os.dup2(terminal, STDERR)
        os.close(terminal)
