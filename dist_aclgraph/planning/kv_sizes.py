"""The KV lengths for which graphs are captured whose lengths are never updated."""

from __future__ import annotations

SMALLEST = 256


def kv_sizes(max_len: int, block_size: int) -> tuple[int, ...]:
    """Return the lengths in tokens, ascending: each is twice the previous one, in whole blocks, and
    the last one holds a request of ``max_len`` tokens.

    A request attends to padding up to the next length, which is less than twice its own length if
    it has at least 128 tokens.
    """
    sizes, size = [], SMALLEST
    while size < max_len:
        sizes.append(size)
        size *= 2
    sizes.append(max_len)
    return tuple(dict.fromkeys(-(-size // block_size) * block_size for size in sizes))
