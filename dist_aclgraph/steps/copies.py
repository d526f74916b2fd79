"""Messages about copy jobs. The engine sends each worker the jobs that it must begin. The worker
replies immediately with the results of jobs that have ended.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# "save" copies blocks from a device to files, and "load" copies blocks from files to a device.
# "delete" deletes files, and "touch" marks files as used now; both use no device. "find" looks up
# files on a node without an engine, and fetches missing files. One worker of that node executes the
# job, and all other workers ignore the job. "cancel" ends the "find" job with the same number, and
# has no result.
JobKind = Literal["save", "load", "delete", "touch", "find", "cancel"]


class CopyJob(msgspec.Struct, frozen=True):
    """One job on the files of KV blocks and checkpoints.

    Jobs of the kinds "delete", "touch" and "find" have no block ids and no checkpoints.
    """

    number: int
    kind: JobKind
    block_ids: bytes  # int32 [n], the copied blocks
    hashes: bytes  # [n, HASH_BYTES], names of the blocks' files
    depths: bytes  # int32 [n], index of each block in its prompt
    checkpoints: bytes = b""  # int32 [k], numbers of the copied checkpoints
    state_hashes: bytes = b""  # [k, HASH_BYTES], hashes of the last blocks before the checkpoints
    # the group from which "find" fetches missing files; empty if nothing is fetched
    source: bytes = b""

    @property
    def is_load(self) -> bool:
        return self.kind == "load"

    @property
    def is_look_up(self) -> bool:
        """Whether the job begins or ends a look-up of files on a node without an engine."""
        return self.kind in ("find", "cancel")

    @property
    def is_upkeep(self) -> bool:
        """Whether the job uses only files, not the device."""
        return self.kind in ("delete", "touch")


class BlockCopyJobs(msgspec.Struct, frozen=True, tag="copies"):
    """The copy jobs that the workers of one data-parallel rank must begin. There may be none."""

    epoch: int
    number: int
    jobs: tuple[CopyJob, ...] = ()


class CopiedBlocks(msgspec.Struct, frozen=True, tag="copied"):
    """A worker's reply to ``BlockCopyJobs``.

    ``ended`` contains a pair for each job that has ended. The first element is the job's number.
    For a job that writes files, the second element is the number of written blocks. For a job that
    reads or looks up files, the second element is the number of leading blocks that were read or
    found. ``num_read`` maps the name of each tier to the number of blocks that the worker has read
    from this tier until now. ``fetched`` contains the fields of ``FetchCounts``; ``fetched`` is
    empty if the worker fetches no files.
    """

    epoch: int
    number: int
    rank: int
    ended: tuple[tuple[int, int], ...] = ()
    num_read: dict[str, int] = {}
    fetched: dict[str, int] = {}
