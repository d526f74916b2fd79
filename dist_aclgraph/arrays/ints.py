"""Integers in messages: little-endian int32, packed into bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

INT_BYTES = 4
assert sys.byteorder == "little" and array("i").itemsize == INT_BYTES


def int_list(values: Sequence[int] | IntArray = ()) -> array[int]:
    """Return an array of int32 that can grow. ``pack_ints`` copies the bytes of such an array only
    once.
    """
    if not isinstance(values, np.ndarray):
        return array("i", values)
    found = array("i")
    found.frombytes(pack_ints(values))
    return found


def pack_ints(values: Sequence[int] | IntArray) -> bytes:
    if isinstance(values, np.ndarray):
        return values.astype("<i4", copy=False).tobytes()
    return (values if isinstance(values, array) else array("i", values)).tobytes()


def listed_ints(data: bytes) -> list[int]:
    """Return packed integers as a list. For few integers, a list is much cheaper than an array."""
    return memoryview(data).cast("i").tolist()


def unpack_ints(data: bytes, width: int | None = None) -> IntArray:
    """Return a read-only [n] view of packed integers, or [n, width] if ``width`` is given."""
    flat = np.frombuffer(data, dtype="<i4")
    return flat if width is None else flat.reshape(-1, width)
