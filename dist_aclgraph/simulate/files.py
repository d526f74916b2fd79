"""Simulates files of KV blocks: which files a node has, and how long copy jobs take.

The real scheduler decides which blocks are copied. Files are deleted by the rule of
``kv/block_files.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.kv.block_files import BLOCK_AGE_S
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import Files
from dist_aclgraph.kv.tiers import DISK, HOST
from dist_aclgraph.scheduler.file_upkeep import TOUCH_S
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.simulate.copy_rates import CopyRates
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.steps.copies import CopyJob


class SimulatedTier:
    """The files of one tier. If a new file does not fit, the least recently used file is deleted.

    Args:
        capacity: maximum number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used_s: dict[BlockHash, float] = {}
        # the files to delete next, each with the time of its last use
        self._oldest: deque[tuple[float, BlockHash]] = deque()

    def __len__(self) -> int:
        return len(self._used_s)

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._used_s

    def use(self, block_hash: BlockHash, used_s: float) -> None:
        if block_hash in self._used_s:
            self._used_s[block_hash] = used_s

    def add(self, block_hash: BlockHash, used_s: float) -> bool:
        """Add a file if it does not exist. Return whether the tier has the file afterwards."""
        if block_hash in self._used_s:
            return True
        if not self.capacity:
            return False
        while len(self._used_s) >= self.capacity:
            if not self._oldest:
                found = sorted((at_s, each) for each, at_s in self._used_s.items())
                self._oldest.extend(found[: self.capacity // 10 + 1])
            at_s, oldest = self._oldest.popleft()
            if self._used_s.get(oldest) == at_s:
                del self._used_s[oldest]
        self._used_s[block_hash] = used_s
        return True

    def delete(self, block_hash: BlockHash) -> None:
        self._used_s.pop(block_hash, None)


@dataclass
class SimulatedNode:
    """The files that all groups of a node share.

    Attributes:
        tiers: the tiers by name, in the order in which they are searched.
    """

    tiers: Mapping[str, SimulatedTier]
    has_states: bool = False
    _states: set[BlockHash] = field(default_factory=set)

    @classmethod
    def of(cls, deployment: AssumedDeployment) -> SimulatedNode:
        """Return an empty node with the tiers of the configuration."""
        sizes = deployment.copied_blocks
        tiers = {name: SimulatedTier(count) for name, count in sizes.items()}
        return cls(tiers, deployment.facts.linear is not None)

    @property
    def files(self) -> Files:
        return Files(self._has, self._states.__contains__ if self.has_states else None)

    def _has(self, block_hash: BlockHash) -> bool:
        return self.tier_of(block_hash) is not None

    def tier_of(self, block_hash: BlockHash) -> str | None:
        """Return the first tier that has a block; None if no tier has it."""
        return next((name for name, tier in self.tiers.items() if tier.has(block_hash)), None)

    def write(self, block_hash: BlockHash, used_s: float) -> bool:
        """Write a block to all tiers. Return whether the first tier has the block afterwards."""
        first, *others = self.tiers.values()
        for tier in others:
            tier.add(block_hash, used_s)
        return first.add(block_hash, used_s)

    def read(self, block_hash: BlockHash, used_s: float) -> str | None:
        """Read a block, and copy it to the first tier. Return the name of the tier from which the
        block was read; None if no tier has the block.
        """
        found = self.tier_of(block_hash)
        if found is not None:
            self.tiers[found].use(block_hash, used_s)
            next(iter(self.tiers.values())).add(block_hash, used_s)
        return found

    def add_fetched(self, block_hash: BlockHash, used_s: float) -> bool:
        """Add a block from another node to the first tier. Return whether this tier has the block
        afterwards.
        """
        return next(iter(self.tiers.values())).add(block_hash, used_s)

    def use(self, block_hash: BlockHash, used_s: float) -> None:
        for tier in self.tiers.values():
            tier.use(block_hash, used_s)

    def delete(self, block_hash: BlockHash) -> None:
        for tier in self.tiers.values():
            tier.delete(block_hash)
        self._states.discard(block_hash)

    def write_state(self, block_hash: BlockHash) -> None:
        self._states.add(block_hash)

    def has_state(self, block_hash: BlockHash) -> bool:
        return block_hash in self._states


@dataclass(order=True)
class _Running:
    end_s: float
    order: int
    dp_rank: int = field(compare=False)
    job: CopyJob = field(compare=False)
    num_whole: int = field(compare=False)


class SimulatedCopies:
    """Runs the copy jobs of one group. All workers of a data-parallel rank need the same time for a
    job.

    Args:
        block_bytes: number of bytes of a block on each NPU.
        num_files: number of files that all workers of a data-parallel rank together write for one
            block.

    Attributes:
        num_loaded: number of blocks that were read from each tier.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        node: SimulatedNode,
        rates: CopyRates,
        *,
        block_bytes: int,
        num_files: int,
        ranks_per_batch: int,
    ) -> None:
        self._scheduler = scheduler
        self._node = node
        self._block_s = {
            HOST: block_bytes / rates.host,
            DISK: block_bytes * num_files / rates.disk + block_bytes / rates.host,
        }
        self._ranks_per_batch = ranks_per_batch
        self._running: list[_Running] = []  # a heap
        self._num_begun = 0
        # For each data-parallel rank, the time at which its last job ends.
        self._free_s: dict[int, float] = {}
        self._touched_s = 0.0
        self.num_loaded: Counter[str] = Counter()

    @property
    def next_end_s(self) -> float:
        """The time at which the next job ends; infinite if no job runs."""
        return self._running[0].end_s if self._running else math.inf

    def advance(self, now_s: float, *, is_idle: bool) -> bool:
        """End the jobs whose end time has come, and begin the jobs that the scheduler decides now.
        Return True in two cases: a job has ended, or blocks wait to be copied while no job runs.

        Args:
            is_idle: whether no step is in flight.
        """
        has_changed = self.next_end_s <= now_s
        while self.next_end_s <= now_s:
            self._end(heapq.heappop(self._running))
        may_touch = now_s - self._touched_s >= TOUCH_S
        if may_touch:
            self._touched_s = now_s
        taken = self._scheduler.copies.take_jobs(is_idle=is_idle, may_touch=may_touch)
        for dp_rank, jobs in enumerate(taken):
            for job in jobs:
                self._begin(dp_rank, job, now_s)
        waits = self._scheduler.copies.is_busy
        return has_changed or (waits and not self._running)

    def _begin(self, dp_rank: int, job: CopyJob, now_s: float) -> None:
        node, num_whole, took_s = self._node, 0, 0.0
        for block_hash, depth in _files_of(job):
            used_s = now_s - depth * BLOCK_AGE_S
            if job.kind == "load":
                tier = node.read(block_hash, used_s)
                if tier is None:
                    break
                self.num_loaded[tier] += 1
                took_s += self._block_s[tier]
                num_whole += 1
            elif job.kind == "save":
                took_s += self._block_s[HOST]
                num_whole += 1
            elif job.kind == "touch":
                node.use(block_hash, used_s)
            else:
                node.delete(block_hash)
        if job.is_load and not all(map(node.has_state, _split(job.state_hashes))):
            num_whole = 0
        end_s = self._free_s[dp_rank] = max(self._free_s.get(dp_rank, 0.0), now_s) + took_s
        running = _Running(end_s, self._num_begun, dp_rank, job, num_whole)
        self._num_begun += 1
        heapq.heappush(self._running, running)

    def _end(self, running: _Running) -> None:
        job = running.job
        if job.kind == "save":
            running.num_whole = sum(
                self._node.write(block_hash, running.end_s - depth * BLOCK_AGE_S)
                for block_hash, depth in _files_of(job)
            )
            for block_hash in _split(job.state_hashes):
                self._node.write_state(block_hash)
        first = running.dp_rank * self._ranks_per_batch
        for rank in range(first, first + self._ranks_per_batch):
            self._scheduler.copies.end(job.number, rank, running.num_whole)


def make_copies(
    scheduler: Scheduler, deployment: AssumedDeployment, node: SimulatedNode, rates: CopyRates
) -> SimulatedCopies:
    """Return the simulated copies for a group of this deployment."""
    return SimulatedCopies(
        scheduler,
        node,
        rates,
        block_bytes=deployment.planner.cache_spec.bytes_per_block,
        num_files=deployment.files_per_block,
        ranks_per_batch=deployment.layout.tp * deployment.layout.pcp,
    )


def _files_of(job: CopyJob) -> Iterator[tuple[BlockHash, int]]:
    return zip(_split(job.hashes), unpack_ints(job.depths).tolist(), strict=True)


def _split(hashes: bytes) -> list[BlockHash]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
