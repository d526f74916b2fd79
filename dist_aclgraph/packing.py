"""Several arrays of numbers in one transfer: where each of them begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

ALIGNMENT = 128  # of 4 bytes: 512 in all, what vector units read at once; operators want 32


def aligned(size: int) -> int:
    """Return how many places an array of ``size`` integers takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack_parts(sizes: Iterable[int]) -> tuple[list[slice], int]:
    """Return where arrays of these sizes lie, on aligned places, and the size of the whole."""
    parts, end = [], 0
    for size in sizes:
        parts.append(slice(end, end + size))
        end += aligned(size)
    return parts, end


def stack_rows(arrays: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Return arrays of one size as rows that begin on aligned places: [arrays, aligned(size)]."""
    stacked = np.zeros((len(arrays), aligned(len(arrays[0]))), np.float32)
    stacked[:, : len(arrays[0])] = arrays
    return stacked
