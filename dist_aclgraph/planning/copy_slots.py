"""The memory through which KV blocks and recurrent states are copied to files and from files."""

from __future__ import annotations

NUM_SLOTS = 4
NUM_STATE_SLOTS = 2  # number of slots for recurrent states; small, because such a slot can be large
# A slot has room for as many blocks as fit in SLOT_BYTES, but at least 1 and at most MAX_BLOCKS.
SLOT_BYTES = 32 << 20
MAX_BLOCKS = 64


def blocks_per_slot(block_bytes: int) -> int:
    """Return the number of blocks in a slot.

    Args:
        block_bytes: bytes of a block in all layers together, on one rank.
    """
    return max(1, min(MAX_BLOCKS, SLOT_BYTES // block_bytes))


def slot_bytes(block_bytes: int, state_bytes: int = 0) -> int:
    """Return how many bytes of device memory all slots of a rank use. The slots use the same number
    of bytes of pinned host memory.

    Args:
        state_bytes: bytes of a request's recurrent state in all layers together, on one rank.
    """
    found = NUM_SLOTS * blocks_per_slot(block_bytes) * block_bytes
    if state_bytes:
        found += NUM_STATE_SLOTS * blocks_per_slot(state_bytes) * state_bytes
    return found
