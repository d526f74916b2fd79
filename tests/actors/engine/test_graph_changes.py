"""While a group serves, it changes its graphs one by one, between steps with little work, and on
all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_aclgraph.actors.capture.graph_changes import (
    MAX_FAILURES,
    PATIENCE_STEPS,
    STEPS_BETWEEN,
    GraphChanges,
)
from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.lazy import LazyGraphs
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan
from dist_aclgraph.planning.rebucketing import Action, Capture, Release
from tests.actors.fakes import FakeRanks
from tests.plans import decode_graph, make_plan

OLD, NEW = make_plan(1, 8, 32), make_plan(1, 12, 20, 32, version=2)
ACTIONS: tuple[Action, ...] = (
    Capture(decode_graph(20)),
    Capture(decode_graph(12)),
    Release(decode_graph(8)),
)


class Serving:
    """A group of fake ranks that serves with ``plan``."""

    def __init__(
        self, ranks: FakeRanks, plan: GraphPlan = OLD, lazy: LazyGraphs | None = None
    ) -> None:
        self.ranks = ranks
        self.dispatcher = GraphDispatcher(plan, lazy)
        for state in ranks.states:
            state.plan = plan
            state.captured = set(plan.capture_order)
            state.committed = set(plan.capture_order)
        costs = dict.fromkeys(plan.capture_order, CaptureCost())
        self.changes = GraphChanges(self.dispatcher, GraphTransaction(ranks, 1.0, 1.0), costs)

    def run(self, batch: int, is_quiet: bool = True) -> bool:
        """Run one step; return whether the group changed graphs just before the step."""
        is_due = self.changes.is_due(False, is_quiet)
        if is_due:
            before = len(self.ranks.moves)
            self.changes.advance()
            moves = [move for move, _ in self.ranks.moves[before:]]
            # A release makes room for the capture of another graph. If this capture fails, the
            # released graph is captured again.
            assert moves.count("capture") <= (2 if moves[:1] == ["release"] else 1)
        graph, _ = self.dispatcher.dispatch(batch, batch, 1)
        for state in self.ranks.states:
            assert graph is None or graph in state.committed
        assert set(self.changes.costs) == self.dispatcher.graphs
        return is_due

    def assert_all_hold(self, plan: GraphPlan, lazy: Sequence[int] = ()) -> None:
        graphs = set(plan.capture_order) | set(map(decode_graph, lazy))
        for state in self.ranks.states:
            assert state.plan == plan
            assert state.captured == state.committed == graphs
        assert self.dispatcher.plan == plan
        assert self.dispatcher.graphs == graphs


def make_lazy(capacity: int = 1) -> LazyGraphs:
    family = GraphFamily(run_mode="FULL", query_len=1, buckets=(1, 8, 16, 32))
    return LazyGraphs((family,), 64, capacity=capacity, min_tokens=100, retry_steps=10_000)


def test_without_a_new_plan_or_lazy_graphs_nothing_is_ever_due() -> None:
    serving = Serving(FakeRanks())

    assert not any(serving.run(5) for _ in range(50))
    assert not serving.changes.is_due(True, True)


def test_a_new_plan_is_reached_by_one_capture_at_a_time() -> None:
    serving = Serving(FakeRanks())
    serving.changes.change_plan(NEW, ACTIONS)

    changed = [step for step in range(60) if serving.run(18)]

    serving.assert_all_hold(NEW)
    assert not serving.changes.is_changing
    assert len(changed) == 3
    assert changed[1] - changed[0] >= STEPS_BETWEEN
    # Until the new graph of a batch exists, the batch uses the graph of the previous plan.
    assert serving.dispatcher.misses == {}


def test_a_busy_group_changes_its_graphs_too_only_later() -> None:
    serving = Serving(FakeRanks())
    serving.changes.change_plan(NEW, ACTIONS)
    while not serving.run(5):
        pass

    steps = next(step for step in range(1, 1000) if serving.run(5, is_quiet=False))

    assert steps == PATIENCE_STEPS


def test_an_idle_group_does_not_wait() -> None:
    serving = Serving(FakeRanks())
    serving.changes.change_plan(NEW, ACTIONS)

    for _ in range(3):
        assert serving.changes.is_due(True, True)
        serving.changes.advance()

    serving.assert_all_hold(NEW)


def test_a_graph_that_cannot_be_captured_is_left_out_of_the_new_plan() -> None:
    serving = Serving(FakeRanks(failures={(1, decode_graph(20)): "streams"}))
    serving.changes.change_plan(NEW, ACTIONS)

    for _ in range(60):
        serving.run(18)

    plan = serving.dispatcher.plan
    assert plan.families[0].buckets == (1, 12, 32)
    assert plan.version == 3
    serving.assert_all_hold(plan)
    assert "rank 1 failed (streams)" in serving.changes.failures[0]


def test_a_frequent_shape_gets_a_lazy_graph_and_replays_it() -> None:
    serving = Serving(FakeRanks(), lazy=make_lazy())

    for _ in range(60):
        serving.run(12)

    serving.assert_all_hold(OLD, lazy=[16])
    assert serving.dispatcher.replays[decode_graph(16)] > 0


def test_a_lazy_graph_makes_room_for_the_next() -> None:
    serving = Serving(FakeRanks(), make_plan(32), lazy=make_lazy())

    for batch in (12, 5):
        for _ in range(60):
            serving.run(batch)

    serving.assert_all_hold(make_plan(32), lazy=[8])


def test_a_lazy_graph_that_fails_is_undone_and_not_tried_again() -> None:
    ranks = FakeRanks(failures={(0, decode_graph(16)): "memory"})
    serving = Serving(ranks, lazy=make_lazy())

    for _ in range(200):
        serving.run(12)

    serving.assert_all_hold(OLD)
    assert [m for m in ranks.moves if m[0] == "capture"] == [("capture", decode_graph(16))]


def test_a_lazy_graph_that_becomes_part_of_a_plan_is_not_captured_again() -> None:
    ranks = FakeRanks()
    serving = Serving(ranks, lazy=make_lazy())
    for _ in range(60):
        serving.run(12)
    new = make_plan(1, 8, 16, 32, version=2)
    serving.changes.change_plan(new, [Capture(decode_graph(16))])

    for _ in range(40):
        serving.run(12)

    serving.assert_all_hold(new)
    assert serving.dispatcher.lazy is not None
    assert serving.dispatcher.lazy.graphs == ()
    assert [m for m in ranks.moves if m[0] == "capture"] == [("capture", decode_graph(16))]


def test_a_shape_that_always_fails_fills_no_report() -> None:
    failing = FakeRanks(failures={(1, decode_graph(16)): "streams"})
    family = GraphFamily(run_mode="FULL", query_len=1, buckets=(16,))
    lazy = LazyGraphs((family,), 64, capacity=1, min_tokens=1, retry_steps=1)
    serving = Serving(failing, lazy=lazy)

    for _ in range(2 * MAX_FAILURES * STEPS_BETWEEN):
        serving.run(12)

    assert len(serving.changes.failures) == MAX_FAILURES


def test_a_graph_of_the_plan_never_makes_room_for_a_lazy_one() -> None:
    serving = Serving(FakeRanks(), make_plan(32), lazy=make_lazy())
    plan = make_plan(16, 32, version=2)
    for _ in range(STEPS_BETWEEN):
        serving.dispatcher.dispatch(12, 12, 1)  # repeated until a lazy graph of 16 tokens is due
    serving.changes.change_plan(plan, (Capture(decode_graph(16)),))

    for batch in (12, 5):
        for _ in range(60):
            serving.run(batch)

    serving.assert_all_hold(plan, lazy=[8])


def test_a_lazy_graph_that_fails_costs_no_other_one() -> None:
    ranks = FakeRanks(failures={(0, decode_graph(8)): "memory"})
    serving = Serving(ranks, make_plan(32), lazy=make_lazy())
    for _ in range(60):
        serving.run(12)
    serving.assert_all_hold(make_plan(32), lazy=[16])

    for _ in range(60):
        serving.run(5)

    serving.assert_all_hold(make_plan(32), lazy=[16])
    assert serving.dispatcher.lazy is not None
    assert serving.dispatcher.lazy.graphs == (decode_graph(16),)
    assert len(serving.changes.failures) == 1


def test_a_lazy_graph_that_cannot_be_captured_again_is_removed() -> None:
    ranks = FakeRanks()
    serving = Serving(ranks, make_plan(32), lazy=make_lazy())
    for _ in range(60):
        serving.run(12)
    ranks.failures |= {(0, decode_graph(8)): "memory", (1, decode_graph(16)): "memory"}

    for _ in range(60):
        serving.run(5)

    serving.assert_all_hold(make_plan(32))
    assert serving.dispatcher.lazy is not None
    assert serving.dispatcher.lazy.graphs == ()
