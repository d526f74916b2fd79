"""Fake ranks of a lockstep group, for tests that run without Ray actors."""

from __future__ import annotations

from dataclasses import dataclass, field

from dist_aclgraph.errors import FailureCause
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan


@dataclass
class FakeRank:
    """The state of one rank: its plan, and the graphs that it has captured and committed."""

    rank: int
    streams: int
    plan: GraphPlan | None = None
    captured: set[BatchDescriptor] = field(default_factory=set)
    committed: set[BatchDescriptor] = field(default_factory=set)


@dataclass
class FakeRanks:
    """A lockstep group whose ranks use one stream per graph. The attributes set the failures that
    ranks report.

    Attributes:
        streams: number of streams that each rank's device has for graphs.
        failures: for a rank and a graph, the cause with which the graph's capture fails.
        unprepared: for a rank and a graph, the cause with which the graph's warm-up fails.
        digests: for a rank and a graph, the digest that this rank reports instead of the usual one.
        holds_another_plan: the rank that adopts a different plan from the other ranks.
        leaks: the rank that does not free the streams of released graphs.
        breaks: a rank and an action; the rank's device fails in this action.
        keeps_bytes: the rank that uses more memory after the release of a graph than before its
            capture.
        counts: whether the devices report the number of free streams.
    """

    streams: tuple[int, ...] = (100, 100)
    failures: dict[tuple[int, BatchDescriptor], FailureCause] = field(default_factory=dict)
    unprepared: dict[tuple[int, BatchDescriptor], FailureCause] = field(default_factory=dict)
    digests: dict[tuple[int, BatchDescriptor], str] = field(default_factory=dict)
    holds_another_plan: int | None = None
    leaks: int | None = None
    keeps_bytes: int | None = None
    breaks: tuple[int, GraphAction] | None = None
    counts: bool = True

    def __post_init__(self) -> None:
        self.ranks = tuple(range(len(self.streams)))
        self.states = [FakeRank(rank, count) for rank, count in enumerate(self.streams)]
        self.moves: list[tuple[GraphAction, BatchDescriptor | None]] = []

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        self.moves.append((action, graph))
        return [self._answer(state, action, graph, plan) for state in self.states]

    def _answer(
        self,
        state: FakeRank,
        action: GraphAction,
        graph: BatchDescriptor | None,
        plan: GraphPlan | None,
    ) -> GraphAnswer:
        failure, cost = None, CaptureCost()
        if plan is not None:
            state.plan = plan
        if graph is not None:
            key = (state.rank, graph)
            if action == "prepare":
                failure = self.unprepared.get(key)
            elif action == "capture":
                failure = self._capture(state, graph)
                digest = self.digests.get(key, "as usual")
                cost = CaptureCost(streams=1, seconds=0.5 + state.rank, digest=digest)
            elif action == "commit":
                assert graph in state.captured
                state.committed.add(graph)
            elif state.rank != self.leaks:
                state.captured.discard(graph)
                state.committed.discard(graph)
        if self.breaks == (state.rank, action):
            failure = "operator"
        held = "f00d" if state.rank == self.holds_another_plan else state.plan and state.plan.hash
        return GraphAnswer(
            1,
            len(self.moves),
            state.rank,
            failure=failure,
            message="as told" if failure else "",
            plan_hash=held or "",
            cost=cost,
            live_bytes=512 * (action == "release" and state.rank == self.keeps_bytes),
            free_streams=state.streams - len(state.captured) if self.counts else None,
        )

    def _capture(self, state: FakeRank, graph: BatchDescriptor) -> FailureCause | None:
        cause = self.failures.get((state.rank, graph))
        if cause is None and len(state.captured) == state.streams:
            cause = "streams"
        if cause is None:
            state.captured.add(graph)
        return cause
