"""Stand-ins for actors, for tests that need no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dist_aclgraph.actors.worker import CaptureOutcome
from dist_aclgraph.graph.plan import CaptureCause, CaptureCost, GraphPlan


@dataclass
class FakeRank:
    """What one rank holds: a plan and captured buckets."""

    rank: int
    streams: int
    plan: GraphPlan | None = None
    captured: set[int] = field(default_factory=set)


class FakeRanks:
    """A lockstep group whose ranks capture at one stream a bucket, and fail where told to.

    Args:
        streams: of each rank.
        failures: by (rank, bucket), the cause that a capture fails with.
        holds_another_plan: a rank that confirms something else.
    """

    def __init__(
        self,
        streams: tuple[int, ...] = (100, 100),
        failures: dict[tuple[int, int], CaptureCause] | None = None,
        holds_another_plan: int | None = None,
    ) -> None:
        self.ranks = tuple(range(len(streams)))
        self.states = [FakeRank(rank, count) for rank, count in enumerate(streams)]
        self.calls: list[tuple[str, Any]] = []
        self._failures = failures or {}
        self._holds_another_plan = holds_another_plan

    def call(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        arguments: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        given = [arguments(i) if arguments else () for i in range(len(self.states))]
        self.calls.append((method, given[0][0] if given[0] else None))
        work = getattr(self, f"_{method}")
        return [work(state, *args) for state, args in zip(self.states, given, strict=True)]

    def _confirm(self, state: FakeRank, plan: GraphPlan) -> str:
        state.plan = plan
        return "f00d" if state.rank == self._holds_another_plan else plan.hash

    def _warm_up(self, state: FakeRank, bucket: int) -> CaptureOutcome:
        return CaptureOutcome(state.rank)

    def _capture(self, state: FakeRank, bucket: int, plan_hash: str) -> CaptureOutcome:
        assert state.plan is not None
        assert plan_hash == state.plan.hash
        cause = self._failures.get((state.rank, bucket))
        if cause is None and len(state.captured) == state.streams:
            cause = "streams"
        if cause is not None:
            return CaptureOutcome(state.rank, failure=cause, message="as told")
        state.captured.add(bucket)
        return CaptureOutcome(state.rank, CaptureCost(streams=1, seconds=0.5 + state.rank))

    def _release(self, state: FakeRank, bucket: int) -> int:
        state.captured.discard(bucket)
        return state.streams - len(state.captured)
