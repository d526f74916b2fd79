"""Integers as they travel: little-endian int32, packed into bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


def pack_ints(values: list[int] | IntArray) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes, width: int | None = None) -> IntArray:
    """Return a read-only [n] view of packed integers, or [n, width] where ``width`` is given."""
    flat = np.frombuffer(data, dtype="<i4")
    return flat if width is None else flat.reshape(-1, width)
