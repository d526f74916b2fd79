"""GroupCopies: copies KV blocks to and from files, for all data-parallel ranks of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import Files, LookUps
from dist_aclgraph.scheduler.block_copies import BlockCopies
from dist_aclgraph.scheduler.node_look_ups import NodeLookUps
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.waiting_requests import WaitingRequests
from dist_aclgraph.steps.copies import CopyJob


class GroupCopies:
    """Decides which blocks of all ranks are copied. While a request's blocks are read from files,
    the request waits.

    Args:
        pools: the block pool of each data-parallel rank.
        look_ups: looks up the files of KV blocks; None if no copies are kept.
        ranks_per_batch: number of workers of each data-parallel rank.
        waiting: the group's waiting requests; some of them wait until their files are read.
        files: the files that each node of the group has; None if all workers are on the engine's
            node.

    Attributes:
        ranks: the ``BlockCopies`` of each data-parallel rank; empty if no copies are kept.
        spans_nodes: whether the workers are on several nodes.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        look_ups: LookUps | None,
        ranks_per_batch: int,
        waiting: WaitingRequests,
        files: GroupFiles | None = None,
    ) -> None:
        self._ranks_per_batch = ranks_per_batch
        self._waiting = waiting
        self.spans_nodes = files is not None and len(files.nodes) > 1
        size = ranks_per_batch
        self.ranks = [
            _copies_of(index, pool, look_ups, range(index * size, (index + 1) * size), files)
            for index, pool in enumerate(pools)
            if look_ups is not None
        ]

    @property
    def is_running(self) -> bool:
        """Whether a copy job or a look-up on another node runs."""
        return any(copies.num_running for copies in self.ranks)

    @property
    def is_looking(self) -> bool:
        """Whether a look-up of block files is running."""
        return any(copies.is_looking for copies in self.ranks) or self._waiting.is_looking

    @property
    def is_busy(self) -> bool:
        """Whether a copy job runs, or blocks wait to be written."""
        return any(copies.is_busy for copies in self.ranks)

    def counts(self) -> dict[str, int]:
        """Return the sums of ``CopyCounts`` over all ranks; empty if no copies are kept."""
        total: Counter[str] = Counter()
        for copies in self.ranks:
            total.update(asdict(copies.counts))
        return dict(total)

    def take_jobs(self, *, is_idle: bool, may_touch: bool = False) -> list[tuple[CopyJob, ...]]:
        """Return the jobs that the workers of each data-parallel rank must begin now; see
        ``BlockCopies.take_jobs``.
        """
        return [copies.take_jobs(is_idle=is_idle, may_touch=may_touch) for copies in self.ranks]

    def end(self, number: int, rank: int, num_whole: int) -> None:
        """Record that a worker has ended a copy job. When all workers have ended the job, the
        request that waits for this job returns to the queue.
        """
        request = self.ranks[rank // self._ranks_per_batch].end(number, rank, num_whole)
        if request is not None:
            self._waiting.end_fetching([request])

    def have_ended(self, request: Request) -> bool:
        """Return False while a block of an ended request waits to be written to a file."""
        return self.ranks[request.dp_rank].have_ended(request.hashes)

    def stop_fetching(self, dp_rank: int) -> int:
        """Let no request wait for the copy jobs of a data-parallel rank any more. Requests may wait
        again after one of these jobs has ended.

        Returns how many requests were waiting for blocks from files.
        """
        return self._waiting.end_fetching(self.ranks[dp_rank].note_late())

    def forget(self) -> None:
        """Drop all jobs, because the workers have lost the jobs. After this call, no request waits
        for files.
        """
        self._waiting.end_fetching([each for copies in self.ranks for each in copies.forget()])


def _copies_of(
    dp_rank: int, pool: BlockPool, look_ups: LookUps, ranks: range, files: GroupFiles | None
) -> BlockCopies:
    if files is None:
        return BlockCopies(pool, look_ups, ranks)
    is_beside_engine = files.is_beside_engine(dp_rank)
    if not is_beside_engine:
        # The files of this data-parallel rank are on other nodes, so the engine looks up no files.
        # Workers get jobs for all blocks, and skip the blocks that have files.
        look_ups = LookUps(
            Files(_has_none, _has_none if look_ups.has_states else None), look_ups.clock
        )
    elsewhere = NodeLookUps(
        files.finders(dp_rank), is_beside_engine=is_beside_engine, only_workers=files.only_workers
    )
    return BlockCopies(pool, look_ups, ranks, elsewhere)


def _has_none(_: BlockHash) -> bool:
    return False
