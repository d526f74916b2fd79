"""Reading a checkpoint into the page cache ahead of the ranks that copy out of it.

What is computed of a slice and what the disk brings meanwhile lie side by side then. Each rank of a
node asks for a part of its own of every file, so that together they ask for each byte once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 16 << 20
MEMORY_SHARE = 0.5  # of what is free: more would be forgotten before it is used

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Neighbour:
    """A rank among those of its node that load at the same time."""

    index: int = 0
    count: int = 1


ALONE = Neighbour()


def part(size: int, rank: Neighbour) -> tuple[int, int]:
    """Return where a rank's part of ``size`` bytes begins and ends."""
    return size * rank.index // rank.count, size * (rank.index + 1) // rank.count


def read_ahead(files: Sequence[Path], rank: Neighbour) -> threading.Thread | None:
    """Have the system read this rank's part of the files, in their order, while this process works.

    Returns:
        The thread that asks; None where the files do not fit into memory: there the system's own
        reading ahead must do.
    """
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError:
        return None  # whoever needs it says what is wrong
    if sum(sizes) > MEMORY_SHARE * _available_bytes():
        return None
    thread = threading.Thread(target=_ask, args=(files, sizes, rank), daemon=True)
    thread.start()
    return thread


def _ask(files: Sequence[Path], sizes: Sequence[int], rank: Neighbour) -> None:
    try:
        for file, size in zip(files, sizes, strict=True):
            begin, end = part(size, rank)
            with file.open("rb") as opened:
                for at in range(begin, end, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, end - at)
                    os.posix_fadvise(opened.fileno(), at, count, os.POSIX_FADV_WILLNEED)
    except OSError as e:
        logger.debug("reading ahead ended: %s", e)


def _available_bytes() -> int:
    """Memory that is free, or holds files that nobody needs just now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
