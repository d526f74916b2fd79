"""What a plan becomes after a failed capture."""

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
from dist_aclgraph.graph.plan import (
    CaptureFailure,
    GiveUp,
    GraphPlan,
    Shrink,
    decide_after_failure,
)


def make_plan(*buckets: int) -> GraphPlan:
    return GraphPlan(
        version=1, mode="FULL_DECODE_ONLY", buckets=buckets, budget_model="legacy-last"
    )


def test_lack_of_streams_keeps_as_many_buckets_as_were_captured() -> None:
    plan = make_plan(1, 2, 4, 8, 16, 24, 32).shrink(4, "streams", 3)

    assert plan.version == 2
    assert plan.buckets == (1, 8, 16, 32)
    assert plan.reasons == ("capture of 4 failed on rank 3 (streams): 4 of 7 buckets stay",)


def test_when_the_largest_does_not_fit_the_others_are_tried() -> None:
    assert make_plan(1, 8, 32).shrink(32, "memory", 0).buckets == (1, 8)


def test_a_failing_operator_costs_its_own_bucket_only() -> None:
    assert make_plan(1, 2, 8, 32).shrink(8, "operator", 0).buckets == (1, 2, 32)


def test_a_plan_without_buckets_is_not_a_plan() -> None:
    with pytest.raises(StreamBudgetError, match="rank 1"):
        make_plan(8).shrink(8, "streams", 1)


def test_only_a_bucket_of_the_plan_can_fail() -> None:
    with pytest.raises(GraphError, match="not part of plan 1"):
        make_plan(8).shrink(4, "streams", 1)


@given(st.sets(st.integers(1, 512), min_size=1).map(sorted), st.data())
def test_repeated_failures_end_and_never_bring_a_bucket_back(buckets, data) -> None:
    plan, failed = make_plan(*buckets), set()

    while True:
        bucket = data.draw(st.sampled_from(plan.buckets))
        cause = data.draw(st.sampled_from(["streams", "memory", "operator"]))
        failed.add(bucket)
        decision = decide_after_failure(plan, CaptureFailure(bucket, 0, cause))
        if isinstance(decision, GiveUp):
            break
        assert decision.plan.version == plan.version + 1
        assert set(decision.plan.buckets) < set(plan.buckets)
        assert not failed & set(decision.plan.buckets)
        plan = decision.plan

    assert len(plan.buckets) == 1


def test_a_silent_rank_ends_the_capture() -> None:
    decision = decide_after_failure(make_plan(1, 8), CaptureFailure(8, 2, "timeout"))

    assert decision == GiveUp("rank 2 did not answer while capturing 8")


def test_lack_of_streams_leads_to_a_smaller_plan() -> None:
    plan = make_plan(1, 8)

    decision = decide_after_failure(plan, CaptureFailure(1, 2, "streams"))

    assert decision == Shrink(plan.shrink(1, "streams", 2))


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
