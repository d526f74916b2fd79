"""The messages about copies of KV blocks. The engine sends each worker the copies that begin; the
worker replies at once with the copies that have ended.
"""

from __future__ import annotations

import msgspec


class CopyJob(msgspec.Struct, frozen=True):
    """A copy of blocks and checkpoints from a device to files, or from files to a device."""

    number: int
    is_load: bool  # whether files are read
    block_ids: bytes  # int32 [n]
    hashes: bytes  # [n, HASH_BYTES], names of the blocks' files
    checkpoints: bytes = b""  # int32 [k]
    state_hashes: bytes = b""  # [k, HASH_BYTES], hashes of the last blocks before the checkpoints


class BlockCopyJobs(msgspec.Struct, frozen=True, tag="copies"):
    """The copies that the workers of one data-parallel rank begin; perhaps none."""

    epoch: int
    number: int
    jobs: tuple[CopyJob, ...] = ()


class CopiedBlocks(msgspec.Struct, frozen=True, tag="copied"):
    """A worker's reply to ``BlockCopyJobs``: for each copy that has ended, its number, and how many
    of its first blocks were copied.
    """

    epoch: int
    number: int
    rank: int
    ended: tuple[tuple[int, int], ...] = ()
