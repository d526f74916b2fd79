"""The shapes of batches that get a lazy graph, and the older lazy graphs that are evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.lazy import LazyChange, LazyGraphs
from tests.plans import decode_graph, make_plan, pieces

DECODE = GraphFamily(run_mode="FULL", query_len=1, buckets=(1, 2, 4, 8, 16, 32))
MIXED = GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=(8, 16, 32, 64))


def make_lazy(capacity: int = 2, min_tokens: int = 100, retry_steps: int = 50) -> LazyGraphs:
    return LazyGraphs(
        (DECODE, MIXED), 64, capacity=capacity, min_tokens=min_tokens, retry_steps=retry_steps
    )


def run_until_captured(lazy: LazyGraphs, num_tokens: int, query_len: int = 1) -> int:
    """Note eager steps of a batch until its shape is to be captured; return the number of steps."""
    for step in range(1, 1000):
        lazy.note(num_tokens, query_len, None, step)
        if (change := lazy.next_change()) is not None:
            if change.victim is not None:
                lazy.leave(change.victim)
            lazy.enter(change.graph)
            return step
    raise AssertionError("never captured")


def test_a_shape_pays_when_the_tokens_it_would_save_reach_the_minimum() -> None:
    assert run_until_captured(make_lazy(), 20) == 5
    assert run_until_captured(make_lazy(), 3) == 34


def test_padding_counts_by_what_a_graph_of_its_own_would_save() -> None:
    lazy = make_lazy()

    for step in range(7):
        lazy.note(10, 1, decode_graph(32), step)

    assert lazy.next_change() == LazyChange(decode_graph(16))


def test_a_batch_that_replays_its_best_shape_asks_for_nothing() -> None:
    lazy = make_lazy(min_tokens=1)

    lazy.note(10, 1, decode_graph(16), 1)
    lazy.note(99, 1, None, 2)  # this batch is larger than any shape can be

    assert lazy.next_change() is None


def test_mixed_batches_get_pieces() -> None:
    lazy = make_lazy()

    run_until_captured(lazy, 40, query_len=0)

    assert lazy.graphs == (pieces(64),)


def test_the_least_recently_used_graph_makes_room() -> None:
    lazy = make_lazy(capacity=2)
    run_until_captured(lazy, 8)
    run_until_captured(lazy, 16)
    lazy.note(8, 1, decode_graph(8), 1)  # so the graph of 16 tokens is the least recently used

    for _ in range(4):
        lazy.note(32, 1, None, 2)

    assert lazy.next_change() == LazyChange(decode_graph(32), victim=decode_graph(16))


def test_more_shapes_than_there_is_room_for_take_turns_ever_less_often() -> None:
    lazy, captures = make_lazy(capacity=1, min_tokens=100), []

    for step in range(4000):
        batch = 8 if step // 50 % 2 else 16
        used = decode_graph(batch) if decode_graph(batch) in lazy.graphs else None
        lazy.note(batch, 1, used, step)
        change = lazy.next_change()
        if change is not None:
            if change.victim is not None:
                lazy.leave(change.victim)
            lazy.enter(change.graph)
            captures.append(step)

    assert len([step for step in captures if step < 500]) >= 4
    assert len([step for step in captures if step >= 2000]) <= 2


def test_a_shape_that_failed_is_left_alone_for_a_while() -> None:
    lazy = make_lazy(min_tokens=1, retry_steps=50)
    lazy.fail(decode_graph(8), step=10)

    for step in (11, 59):
        lazy.note(8, 1, None, step)
        assert lazy.next_change() is None
    lazy.note(8, 1, None, 60)
    assert lazy.next_change() == LazyChange(decode_graph(8))


@given(st.lists(st.tuples(st.integers(1, 70), st.sampled_from([0, 1])), max_size=200))
def test_there_are_never_more_graphs_than_the_capacity_nor_one_twice(batches) -> None:
    lazy = make_lazy(capacity=3, min_tokens=20)
    dispatcher = GraphDispatcher(make_plan(4, 32), lazy)

    for num_tokens, query_len in batches:
        dispatcher.dispatch(num_tokens, num_tokens if query_len else 1, query_len)
        change = lazy.next_change()
        if change is not None:
            assert change.graph not in dispatcher.graphs
            if change.victim is not None:
                lazy.leave(change.victim)
                dispatcher.remove(change.victim)
            lazy.enter(change.graph)
            dispatcher.add(change.graph)

    assert len(lazy.graphs) <= 3
    assert set(make_plan(4, 32).capture_order) <= dispatcher.graphs
