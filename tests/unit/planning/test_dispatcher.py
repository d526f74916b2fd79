"""The dispatcher at the edges of buckets, its reasons for eager steps, and its counters."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from tests.plans import decode_graph, make_plan, mixed_graph, pieces


def make_dispatcher(*decode: int, mixed: tuple[int, ...] = (), **fields: Any) -> GraphDispatcher:
    return GraphDispatcher(make_plan(*decode, mixed=mixed, version=3, **fields))


@pytest.mark.parametrize(("live", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (7, 8), (8, 8)])
def test_a_decode_batch_replays_the_smallest_bucket_that_holds_it(live: int, bucket: int) -> None:
    assert make_dispatcher(1, 4, 8).dispatch(live, live, 1) == (decode_graph(bucket), None)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((9, 9, 1), "above_largest_bucket"),
        ((4, 2, 2), "prefill"),
        ((5, 2, 0), "mixed"),
    ],
)
def test_a_miss_runs_eagerly_and_says_why(batch: tuple[int, int, int], reason: str) -> None:
    dispatcher = make_dispatcher(1, 4, 8)

    assert dispatcher.dispatch(*batch) == (None, reason)
    assert dispatcher.report()["misses"] == {reason: 1}


def test_a_graph_whose_padding_finds_no_block_is_left_out() -> None:
    dispatcher = make_dispatcher(1, 4, mixed=(8,))

    def fits(graph: BatchDescriptor) -> bool:
        return graph.mode == "PIECEWISE"

    assert dispatcher.dispatch(3, 3, 1, fits) == (pieces(8), None)
    assert make_dispatcher(1, 4).dispatch(3, 3, 1, fits) == (None, "cache_full")


def test_without_graphs_every_batch_misses() -> None:
    assert make_dispatcher(mode="NONE").dispatch(1, 1, 1) == (None, "mode_none")


def test_speculative_decode_fills_whole_requests() -> None:
    dispatcher = make_dispatcher(3, 6, 12, query_len=3)

    assert dispatcher.dispatch(9, 3, 3)[0] == BatchDescriptor(12, 4, 3, "FULL")
    assert dispatcher.dispatch(3, 3, 1)[1] == "prefill"


def test_full_graphs_come_before_pieces_and_pieces_take_the_rest() -> None:
    dispatcher = make_dispatcher(4, 8, mixed=(8, 16))

    assert dispatcher.dispatch(5, 2, 0)[0] == pieces(8)
    assert dispatcher.dispatch(2, 2, 1)[0] == decode_graph(4)
    assert dispatcher.dispatch(9, 9, 1)[0] == pieces(16)
    assert dispatcher.dispatch(17, 2, 0)[1] == "above_largest_bucket"


@pytest.mark.parametrize(("mode", "graph"), [("PIECEWISE", pieces(8)), ("FULL", mixed_graph(8))])
def test_graphs_for_any_batch_take_decode_batches_too(mode: str, graph: BatchDescriptor) -> None:
    dispatcher = make_dispatcher(8, mode=mode)

    assert dispatcher.dispatch(5, 5, 1)[0] == dispatcher.dispatch(7, 2, 0)[0] == graph


def test_a_graph_of_one_token_per_request_takes_no_other_batch() -> None:
    assert make_dispatcher(8).dispatch(5, 2, 1)[0] is None


def test_the_report_counts_replays_and_padding() -> None:
    dispatcher = make_dispatcher(1, 4, 8)

    for live in (1, 3, 4, 6):
        dispatcher.dispatch(live, live, 1)

    assert dispatcher.report() == {
        "plan_version": 3,
        "replays": {"full decode 1": 1, "full decode 4": 2, "full decode 8": 1},
        "misses": {},
        "live_tokens": 14,
        "padded_tokens": 3,
        "padded_by_graph": {"full decode 1": 0, "full decode 4": 1, "full decode 8": 2},
        "wasted_by_graph": {"full decode 1": 0, "full decode 4": 1 / 8, "full decode 8": 1 / 4},
    }


def test_a_report_may_be_asked_for_while_another_thread_dispatches() -> None:
    dispatcher = make_dispatcher(*range(1, 600))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(
        target=lambda: [dispatcher.dispatch(n, n, 1) for n in range(1, 600)], daemon=True
    )

    try:
        thread.start()
        while thread.is_alive():
            dispatcher.report()
    finally:
        sys.setswitchinterval(interval)

    assert sum(dispatcher.report()["replays"].values()) == 599
