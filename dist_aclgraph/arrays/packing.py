"""Computes the offsets of arrays that are copied together in one transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

# 128 elements of 4 bytes are 512 bytes, the size of one read of a vector unit. Operators need only
# an alignment of 32 bytes.
ALIGNMENT = 128


def aligned(size: int) -> int:
    """Return the number of elements reserved for an array of ``size`` integers."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack_parts(sizes: Iterable[int]) -> tuple[list[slice], int]:
    """Return the aligned offsets of arrays of these sizes, and the total size."""
    parts, end = [], 0
    for size in sizes:
        parts.append(slice(end, end + size))
        end += aligned(size)
    return parts, end


def stack_rows(arrays: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Copy arrays of equal size into one tensor, one array in each row: [arrays, aligned(size)]."""
    stacked = np.zeros((len(arrays), aligned(len(arrays[0]))), np.float32)
    stacked[:, : len(arrays[0])] = arrays
    return stacked
