"""Dispatch: bucket edges, misses and their reasons, counters."""

from __future__ import annotations

import sys
import threading

import pytest

from dist_aclgraph.graph.buckets import BatchDescriptor
from dist_aclgraph.graph.dispatcher import GraphDispatcher
from dist_aclgraph.graph.plan import GraphPlan


def make_dispatcher(*buckets: int, mode="FULL_DECODE_ONLY", query_len: int = 1) -> GraphDispatcher:
    plan = GraphPlan(
        version=3, mode=mode, buckets=buckets, query_len=query_len, budget_model="legacy-last"
    )
    return GraphDispatcher(plan)


@pytest.mark.parametrize(("live", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (7, 8), (8, 8)])
def test_a_decode_batch_replays_the_smallest_bucket_that_holds_it(live: int, bucket: int) -> None:
    mode, descriptor, miss = make_dispatcher(1, 4, 8).dispatch(live, live, 1)

    assert (mode, miss) == ("FULL", None)
    assert descriptor == BatchDescriptor(bucket, bucket, 1, "FULL")


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

    assert dispatcher.dispatch(*batch) == ("NONE", None, reason)
    assert dispatcher.report()["misses"] == {reason: 1}


def test_without_graphs_every_batch_misses() -> None:
    assert make_dispatcher(mode="NONE").dispatch(1, 1, 1) == ("NONE", None, "mode_none")


def test_speculative_decode_fills_whole_requests() -> None:
    dispatcher = make_dispatcher(3, 6, 12, query_len=3)

    assert dispatcher.dispatch(9, 3, 3)[1] == BatchDescriptor(12, 4, 3, "FULL")
    assert dispatcher.dispatch(3, 3, 1)[2] == "prefill"


def test_piecewise_graphs_take_mixed_batches() -> None:
    dispatcher = make_dispatcher(4, 8, mode="FULL_AND_PIECEWISE")

    assert dispatcher.dispatch(5, 2, 0)[:2] == ("PIECEWISE", BatchDescriptor(8, 8, 0, "PIECEWISE"))
    assert dispatcher.dispatch(2, 2, 1)[0] == "FULL"
    assert dispatcher.dispatch(9, 2, 0)[2] == "above_largest_bucket"


def test_a_graph_of_one_token_per_request_takes_no_other_batch() -> None:
    assert make_dispatcher(8).dispatch(5, 2, 1)[0] == "NONE"


def test_descriptors_come_in_capture_order() -> None:
    dispatcher = make_dispatcher(4, 8, mode="FULL_AND_PIECEWISE")

    order = [(d.mode, d.num_tokens) for d in dispatcher.descriptors]

    assert order == [("PIECEWISE", 8), ("PIECEWISE", 4), ("FULL", 8), ("FULL", 4)]


def test_the_report_counts_replays_and_padding() -> None:
    dispatcher = make_dispatcher(1, 4, 8)

    for live in (1, 3, 4, 6):
        dispatcher.dispatch(live, live, 1)

    assert dispatcher.report() == {
        "plan_version": 3,
        "replays": {1: 1, 4: 2, 8: 1},
        "misses": {},
        "live_tokens": 14,
        "padded_tokens": 3,
        "padded_by_bucket": {1: 0, 4: 1, 8: 2},
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
