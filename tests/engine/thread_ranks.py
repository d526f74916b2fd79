"""Ranks that are threads of this process. The members of a group meet at barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import ALONE, CommGroup
from dist_aclgraph.layers.context_parallel import ContextParallel

MEETING_S = 180.0  # seconds after which a collective fails if a member is missing


class Meeting:
    """Lets the members of a group exchange tensors, and counts the calls of each member."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size, timeout=MEETING_S)
        self._brought: list[Any] = [None] * size
        self.visits = [0] * size

    def exchange(
        self, rank: int, x: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]
    ) -> Tensor:
        """Wait for all members; return ``combine`` of their values, in the order of their ranks.

        Raises:
            BrokenBarrierError: a member did not call within ``MEETING_S``.
        """
        self.visits[rank] += 1
        self._brought[rank] = x
        self._barrier.wait()
        assert len({each.shape for each in self._brought}) == 1, "members bring equal shapes"
        found = combine(self._brought)
        # No member may release its value before all members have read it.
        self._barrier.wait()
        return found


@dataclass(eq=False)
class ThreadGroup(CommGroup):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_gather(self, x: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, x, torch.stack)

    def all_to_all(self, x: Tensor) -> Tensor:
        def parts(sent: Sequence[Tensor]) -> Tensor:
            return torch.cat([each.chunk(self.size)[self.rank] for each in sent])

        return self.meeting.exchange(self.rank, x, parts)


@dataclass(frozen=True)
class ThreadRanks:
    """``count`` ranks that share a cache.

    Attributes:
        share_prompts: if true, each rank computes all heads for some of the prompt's tokens; if
            false, each rank computes some of the heads for all tokens.
    """

    count: int
    share_prompts: bool
    meeting: Meeting

    @classmethod
    def of(cls, count: int, *, share_prompts: bool) -> ThreadRanks:
        return cls(count, share_prompts, Meeting(count))

    def run(self, work: Callable[[int, ContextParallel], Tensor]) -> list[Tensor]:
        """Call ``work`` with the rank and its groups, on all ranks at the same time; return all
        results.
        """

        def work_of(rank: int) -> Tensor:
            group = ThreadGroup(tuple(range(self.count)), rank, meeting=self.meeting)
            with torch.inference_mode():
                return work(rank, ContextParallel(group, group if self.share_prompts else ALONE))

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(work_of, range(self.count)))
