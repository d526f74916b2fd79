"""Decides which experts each rank of an expert parallel group has.

Every rank has the same number of *slots*; each slot has the weights of one expert. With redundant
experts, there are more slots than experts, so some experts have several copies. The placement is
computed once. Its inputs are the same on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """The expert of each slot. The slots are numbered rank by rank: rank 0 has the first slots.

    Attributes:
        num_experts: number of different experts; their ids are 0 to ``num_experts - 1``.
        ranks: for each rank, the experts of its slots.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def per_rank(self) -> int:
        """Number of slots of a rank."""
        return len(self.ranks[0])

    @property
    def num_slots(self) -> int:
        return self.per_rank * len(self.ranks)

    @property
    def has_copies(self) -> bool:
        """Whether at least one expert is in several slots."""
        return self.num_slots > self.num_experts

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """For each expert, its slots in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(expert for rank in self.ranks for expert in rank):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def slot_table(self) -> IntArray:
        """Return the slots of each expert: [num_experts + 1, maximum number of copies].

        If an expert has fewer copies than this maximum, its slots are repeated. All elements of the
        last row are ``num_slots``. This row is for padding tokens, which no expert runs.
        """
        width = max(map(len, self.slots))
        rows = [[slots[i % len(slots)] for i in range(width)] for slots in self.slots]
        return np.array([*rows, [self.num_slots] * width], np.int32)


def place_experts(
    num_experts: int, ep: int, redundant: int = 0, loads: Sequence[float] | None = None
) -> ExpertPlacement:
    """Return the placement on ``ep`` ranks.

    Without redundant experts, each rank gets a range of experts. Otherwise, additional copies are
    made one at a time, each for the expert that then has the largest load per copy. Then the copies
    are placed, beginning with the copy that has the largest load. Each copy is placed on the rank
    with the smallest load so far. Copies of the same expert are placed on different ranks if enough
    ranks have free slots.

    Args:
        redundant: number of additional copies, for all experts together.
        loads: [num_experts], expected number of tokens of each expert; None means equal loads.

    Raises:
        ConfigError: the slots cannot be divided evenly among the ranks.
    """
    num_slots = num_experts + redundant
    if num_slots % ep:
        what = f"{num_experts} experts" + (f" and {redundant} copies" if redundant else "")
        raise ConfigError(
            f"parallel.ep is {ep}; it must divide the model's {what}, or "
            f"parallel.redundant_experts must add copies: {-num_experts % ep} would do"
        )
    per_rank = num_slots // ep
    if not redundant:
        ranks = [range(first, first + per_rank) for first in range(0, num_slots, per_rank)]
        return ExpertPlacement(num_experts, tuple(map(tuple, ranks)))
    load = [1.0] * num_experts if loads is None else list(loads)
    counts = _copies(load, redundant)
    order = sorted(range(num_experts), key=lambda expert: (-load[expert] / counts[expert], expert))
    chosen: list[list[int]] = [[] for _ in range(ep)]
    open_ranks = [(0.0, rank) for rank in range(ep)]  # a heap of pairs: load, rank
    for expert in order:
        share, taken = load[expert] / counts[expert], list[tuple[float, int]]()
        for _ in range(counts[expert]):
            if not open_ranks:  # the expert has more copies than there are ranks with free slots
                open_ranks, taken = sorted(taken), []
            total, rank = heapq.heappop(open_ranks)
            chosen[rank].append(expert)
            if len(chosen[rank]) < per_rank:
                taken.append((total + share, rank))
        for entry in taken:
            heapq.heappush(open_ranks, entry)
    return ExpertPlacement(num_experts, tuple(tuple(sorted(experts)) for experts in chosen))


def _copies(load: Sequence[float], redundant: int) -> list[int]:
    """Return, for each expert, how many slots it gets."""
    counts = [1] * len(load)
    heap = [(-each, expert) for expert, each in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heap[0]
        counts[expert] += 1
        heapq.heapreplace(heap, (-load[expert] / counts[expert], expert))
    return counts
