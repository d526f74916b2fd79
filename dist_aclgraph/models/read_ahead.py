"""Reads a checkpoint into the page cache before ranks copy slices from it.

So the next chunks are read from the disk while the process converts slices. The chunks of each file
are divided among the ranks of a node. Together, the ranks request each byte of a file once, in
ascending order. All ranks profit from this order, because they need slices of the same tensors at
about the same time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

CHUNK_BYTES = 16 << 20
# Files are read ahead only if they fit in this fraction of the free memory. Otherwise the kernel
# would evict pages before the loader uses them.
MEMORY_SHARE = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Neighbour:
    """A rank's index among the ranks that load weights on the same node at the same time, and the
    number of these ranks.
    """

    index: int = 0
    count: int = 1


ALONE = Neighbour()


def turns(sizes: Sequence[int], rank: Neighbour) -> Iterator[tuple[int, int, int]]:
    """Yield the chunks that a rank requests. For each chunk: index of the file, first byte, number
    of bytes.

    Args:
        sizes: sizes of the files in bytes.
    """
    chunks = (
        (index, begin, min(CHUNK_BYTES, size - begin))
        for index, size in enumerate(sizes)
        for begin in range(0, size, CHUNK_BYTES)
    )
    return islice(chunks, rank.index, None, rank.count)


def read_ahead(files: Sequence[Path], rank: Neighbour) -> threading.Thread | None:
    """Start a thread that requests this rank's chunks of the files, so that the system reads them
    while this process works.

    Returns:
        The thread. None if a file cannot be found, or the files do not fit into memory. Then only
        the operating system reads ahead.
    """
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError:
        return None  # the error is ignored, because the loader will report it
    if sum(sizes) > MEMORY_SHARE * _available_bytes():
        return None
    thread = threading.Thread(target=_ask, args=(files, sizes, rank), daemon=True)
    thread.start()
    return thread


def _ask(files: Sequence[Path], sizes: Sequence[int], rank: Neighbour) -> None:
    try:
        for index, begin, count in turns(sizes, rank):
            with files[index].open("rb") as opened:
                os.posix_fadvise(opened.fileno(), begin, count, os.POSIX_FADV_WILLNEED)
    except OSError as e:
        logger.debug("reading ahead ended: %s", e)


def _available_bytes() -> int:
    """Return the number of bytes of memory that are free or contain only cached files."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
