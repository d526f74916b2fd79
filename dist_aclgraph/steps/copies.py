"""Messages about copy jobs. The engine sends each worker the jobs that begin. The worker replies
at once with the results of the jobs that have ended.
"""

from __future__ import annotations

import msgspec


class CopyJob(msgspec.Struct, frozen=True):
    """A transfer of KV blocks and checkpoints from a device to files, or from files to a device."""

    number: int
    is_load: bool  # whether files are read
    block_ids: bytes  # int32 [n]
    hashes: bytes  # [n, HASH_BYTES], names of the blocks' files
    depths: bytes  # int32 [n], number of blocks before each block in its prompt
    checkpoints: bytes = b""  # int32 [k]
    state_hashes: bytes = b""  # [k, HASH_BYTES], hashes of the last blocks before the checkpoints


class BlockCopyJobs(msgspec.Struct, frozen=True, tag="copies"):
    """The copy jobs that the workers of one data-parallel rank begin; may be empty."""

    epoch: int
    number: int
    jobs: tuple[CopyJob, ...] = ()


class CopiedBlocks(msgspec.Struct, frozen=True, tag="copied"):
    """A worker's reply to ``BlockCopyJobs``: for each job that has ended, the job's number, and the
    number of its leading blocks that were copied.
    """

    epoch: int
    number: int
    rank: int
    ended: tuple[tuple[int, int], ...] = ()
