"""The plan that remains after a failed capture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.device.failures import classify
from dist_aclgraph.errors import (
    CaptureError,
    GraphError,
    OutOfDeviceMemoryError,
    StreamBudgetError,
    StreamExhaustedError,
    WorkerLostError,
)
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import (
    CaptureFailure,
    GiveUp,
    GraphPlan,
    Shrink,
    decide_after_failure,
)


def make_plan(*buckets: int) -> GraphPlan:
    family = GraphFamily(run_mode="FULL", query_len=1, buckets=buckets)
    return GraphPlan(
        version=1, mode="FULL_DECODE_ONLY", families=(family,), budget_model="legacy-last"
    )


def decode(bucket: int) -> BatchDescriptor:
    return BatchDescriptor(bucket, bucket, 1, "FULL")


def buckets_of(plan: GraphPlan) -> tuple[int, ...]:
    (family,) = plan.families
    return family.buckets


def test_lack_of_streams_keeps_as_many_buckets_as_were_captured() -> None:
    plan = make_plan(1, 2, 4, 8, 16, 24, 32).shrink(decode(4), "streams", 3)

    assert plan.version == 2
    assert buckets_of(plan) == (1, 8, 16, 32)
    assert plan.reasons == (
        "capture of full decode 4 failed on rank 3 (streams): 4 of 7 buckets stay",
    )


def test_when_the_largest_does_not_fit_the_others_are_tried() -> None:
    assert buckets_of(make_plan(1, 8, 32).shrink(decode(32), "memory", 0)) == (1, 8)


def test_a_failing_operator_costs_its_own_bucket_only() -> None:
    assert buckets_of(make_plan(1, 2, 8, 32).shrink(decode(8), "operator", 0)) == (1, 2, 32)


def test_a_plan_without_buckets_is_not_a_plan() -> None:
    with pytest.raises(StreamBudgetError, match="rank 1"):
        make_plan(8).shrink(decode(8), "streams", 1)


def test_only_a_bucket_of_the_plan_can_fail() -> None:
    with pytest.raises(GraphError, match="not part of plan 1"):
        make_plan(8).shrink(decode(4), "streams", 1)


bucket_sets = st.sets(st.integers(1, 64), min_size=1, max_size=12).map(lambda s: tuple(sorted(s)))


@given(bucket_sets, bucket_sets, st.data())
def test_repeated_failures_end_and_never_bring_a_graph_back(decode_sizes, mixed_sizes, data):
    plan = GraphPlan(
        version=1,
        mode="FULL_AND_PIECEWISE",
        families=(
            GraphFamily(run_mode="FULL", query_len=1, buckets=decode_sizes),
            GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=mixed_sizes),
        ),
        max_num_seqs=64,
        budget_model="legacy-last",
    )
    failed = set()

    while True:
        graph = data.draw(st.sampled_from(plan.capture_order))
        cause = data.draw(st.sampled_from(["streams", "memory", "operator"]))
        decision = decide_after_failure(plan, CaptureFailure(graph, 0, cause))
        if isinstance(decision, GiveUp):
            break
        assert decision.plan.version == plan.version + 1
        assert set(decision.plan.capture_order) < set(plan.capture_order)
        if graph not in decision.plan.capture_order:
            failed.add(graph)
        assert not failed & set(decision.plan.capture_order)
        plan = decision.plan

    assert plan.num_graphs == 1


def test_a_silent_rank_ends_the_capture() -> None:
    decision = decide_after_failure(make_plan(1, 8), CaptureFailure(decode(8), 2, "timeout"))

    assert decision == GiveUp("rank 2 did not answer while capturing full decode 8")


def test_lack_of_streams_leads_to_a_smaller_plan() -> None:
    plan = make_plan(1, 8)

    decision = decide_after_failure(plan, CaptureFailure(decode(1), 2, "streams"))

    assert decision == Shrink(plan.shrink(decode(1), "streams", 2))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StreamExhaustedError("207008"), "streams"),
        (OutOfDeviceMemoryError(""), "memory"),
        (WorkerLostError("gone", 1), "timeout"),
        (TimeoutError(), "timeout"),
        (CaptureError("561002"), "operator"),
        (RuntimeError(), "operator"),
    ],
)
def test_the_type_of_an_error_tells_its_cause(error: Exception, cause: str) -> None:
    assert classify(error) == cause
