"""Several arrays of integers in one transfer: where each of them begins."""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT = 128  # int32s: 512 bytes, what a chip's vector units read at once; operators want 32


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
