from __future__ import annotations

import pytest

from dist_aclgraph.actors.lockstep_capture import CaptureRecord, capture_plan
from dist_aclgraph.errors import CaptureError, RankDisagreementError
from dist_aclgraph.graph.ledger import Ledger, LedgerEntry
from dist_aclgraph.graph.plan import GraphPlan
from tests.actors.fakes import FakeRanks

BUCKETS = (1, 2, 4, 8, 16)


def make_ledgers(group: FakeRanks) -> list[Ledger]:
    return [
        Ledger(
            rank=rank,
            offered_streams=10,
            offered_bytes=0,
            entries=[LedgerEntry(term=f"bucket {b}", unit="streams", predicted=1) for b in BUCKETS],
        )
        for rank in group.ranks
    ]


def run(group: FakeRanks, ledgers: list[Ledger] | None = None) -> CaptureRecord:
    plan = GraphPlan(
        version=1, mode="FULL_DECODE_ONLY", buckets=BUCKETS, budget_model="legacy-last"
    )
    return capture_plan(
        group,
        plan,
        ledgers or make_ledgers(group),
        confirm_timeout_s=1.0,
        capture_timeout_s=1.0,
        on_bucket=lambda done, total, bucket: None,
    )


def assert_all_hold(group: FakeRanks, plan: GraphPlan) -> None:
    for state in group.states:
        assert state.plan == plan
        assert state.captured == set(plan.buckets)


def test_buckets_are_captured_largest_first_on_all_ranks() -> None:
    group = FakeRanks()

    record = run(group)

    assert [bucket for method, bucket in group.calls if method == "capture"] == [16, 8, 4, 2, 1]
    assert record.rollbacks == []
    assert_all_hold(group, record.plan)


def test_every_capture_follows_a_warm_up_of_its_bucket() -> None:
    group = FakeRanks()

    run(group)

    steps = [call for call in group.calls if call[0] in ("warm_up", "capture")]
    assert steps == [(method, b) for b in (16, 8, 4, 2, 1) for method in ("warm_up", "capture")]


def test_the_slowest_rank_gives_the_seconds_and_each_ledger_its_streams() -> None:
    group = FakeRanks()
    ledgers = make_ledgers(group)

    record = run(group, ledgers)

    assert {b: cost.seconds for b, cost in record.costs.items()} == dict.fromkeys(BUCKETS, 1.5)
    assert all(entry.measured == 1 for ledger in ledgers for entry in ledger.entries)


def test_a_bucket_that_fails_on_one_rank_is_released_on_all() -> None:
    group = FakeRanks(failures={(1, 4): "operator"})

    record = run(group)

    assert record.plan.buckets == (1, 2, 8, 16)
    assert record.plan.version == 2
    assert ("release", 4) in group.calls
    assert "rank 1" in record.rollbacks[0]
    assert "as told" in record.rollbacks[0]
    assert_all_hold(group, record.plan)


def test_a_rank_out_of_streams_keeps_as_many_buckets_as_it_could_capture() -> None:
    group = FakeRanks(streams=(100, 3))

    record = run(group)

    assert len(record.plan.buckets) == 3
    assert {1, 16} <= set(record.plan.buckets)
    assert_all_hold(group, record.plan)


def test_a_new_plan_is_confirmed_before_capture_goes_on() -> None:
    group = FakeRanks(failures={(0, 16): "memory"})

    record = run(group)

    methods = [method for method, _ in group.calls]
    assert methods.count("confirm") == 2
    assert methods.index("release") < len(methods) - 1 - methods[::-1].index("confirm")
    assert_all_hold(group, record.plan)


def test_a_timeout_gives_up_and_names_the_rank() -> None:
    group = FakeRanks(failures={(1, 8): "timeout"})

    with pytest.raises(CaptureError, match="rank 1"):
        run(group)


def test_capture_gives_up_when_no_bucket_is_left() -> None:
    group = FakeRanks(failures={(0, bucket): "operator" for bucket in BUCKETS})

    with pytest.raises(CaptureError, match="no other bucket"):
        run(group)

    assert all(state.captured == set() for state in group.states)


def test_a_rank_that_holds_another_plan_is_named() -> None:
    with pytest.raises(RankDisagreementError, match="rank 1"):
        run(FakeRanks(holds_another_plan=1))
