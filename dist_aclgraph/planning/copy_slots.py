"""The memory for KV blocks and states while they are copied to files or from files."""

from __future__ import annotations

NUM_SLOTS = 4
NUM_STATE_SLOTS = 2  # number of slots for recurrent states, whose slots can be large
# A slot holds as many blocks as fit in SLOT_BYTES, but at least 1 and at most MAX_BLOCKS.
SLOT_BYTES = 32 << 20
MAX_BLOCKS = 64


def blocks_per_slot(block_bytes: int) -> int:
    """Return the number of blocks in a slot.

    Args:
        block_bytes: bytes of a block in all layers, on one rank.
    """
    return max(1, min(MAX_BLOCKS, SLOT_BYTES // block_bytes))


def slot_bytes(block_bytes: int, state_bytes: int = 0) -> int:
    """Return the bytes of all slots of a rank on the device. The slots use the same number of bytes
    of pinned memory.

    Args:
        state_bytes: bytes of the state of a request in all layers, on one rank.
    """
    found = NUM_SLOTS * blocks_per_slot(block_bytes) * block_bytes
    if state_bytes:
        found += NUM_STATE_SLOTS * blocks_per_slot(state_bytes) * state_bytes
    return found
