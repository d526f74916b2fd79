"""A small disk for the temporary files of a service. If this disk is full, only the service is
affected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

SIZE_MIB = 512
CHUNK = bytes(1 << 20)
FILLING = "filling"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a file system in memory within this context, and yield its folder. Yield None if this
    process may not mount it.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=0700", "chaos", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / FILLING).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            try:
                file.write(CHUNK)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
                while file.write(CHUNK[:4096]):  # smaller writes fill the last free pages
                    pass


def make_room(disk: Path) -> None:
    (disk / FILLING).unlink(missing_ok=True)
