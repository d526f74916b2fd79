"""RunningCopy: a copy job that runs, with the blocks that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.copies import JobKind


@dataclass
class RunningCopy:
    """A copy job that runs.

    Attributes:
        kind: the kind of the job; see ``JobKind``.
        held: the blocks that the job holds, in the order of the block table.
        block_ids: the blocks that the job copies. These blocks are the last blocks of ``held``.
        request: the request that waits for the blocks; None if no blocks are read.
        waits_for: the workers that have not ended the job yet.
        num_whole: the smallest number of copied blocks that a worker has reported until now; see
            ``BlockCopies.end``.
        states: for each checkpoint that the job copies, the hash of its block, and its number.
    """

    kind: JobKind
    held: Sequence[int]
    block_ids: Sequence[int]
    hashes: Sequence[BlockHash]
    request: Request | None
    waits_for: set[int]
    states: Sequence[tuple[BlockHash, int]] = ()
    num_whole: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_whole = len(self.block_ids)
