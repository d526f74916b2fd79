from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.capture.lockstep_capture import CaptureRecord, agree, capture_plan
from dist_aclgraph.errors import CaptureError, RankDisagreementError, WorkerError
from dist_aclgraph.planning.ledger import Ledger, LedgerEntry
from dist_aclgraph.planning.plan import GraphPlan
from tests.actors.fakes import FakeRanks
from tests.plans import decode_graph, make_plan, pieces

BUCKETS = (1, 2, 4, 8, 16)
ORDER = [decode_graph(bucket) for bucket in reversed(BUCKETS)]


def make_ledgers(group: FakeRanks) -> list[Ledger]:
    entries = [LedgerEntry(term=str(graph), unit="streams", predicted=1) for graph in ORDER]
    return [
        Ledger(rank=rank, offered_streams=10, offered_bytes=0, entries=list(entries))
        for rank in group.ranks
    ]


def run(
    group: FakeRanks, ledgers: list[Ledger] | None = None, plan: GraphPlan | None = None
) -> CaptureRecord:
    return capture_plan(
        GraphTransaction(group, 1.0, 1.0),
        plan or make_plan(*BUCKETS),
        ledgers or make_ledgers(group),
        lambda record, graph: None,
    )


def buckets(record: CaptureRecord) -> tuple[int, ...]:
    (family,) = record.plan.families
    return family.buckets


def assert_all_hold(group: FakeRanks, plan: GraphPlan) -> None:
    for state in group.states:
        assert state.plan == plan
        assert state.captured == state.committed == set(plan.capture_order)


def test_graphs_are_captured_largest_first_on_all_ranks() -> None:
    group = FakeRanks()

    record = run(group)

    assert [graph for action, graph in group.moves if action == "capture"] == ORDER
    assert record.rollbacks == []
    assert_all_hold(group, record.plan)


def test_pieces_and_whole_graphs_come_in_one_order_by_size() -> None:
    group = FakeRanks()

    run(group, plan=make_plan(4, 16, mixed=(8, 16)))

    captured = [graph for action, graph in group.moves if action == "capture"]
    assert captured == [pieces(16), decode_graph(16), pieces(8), decode_graph(4)]


def test_every_graph_is_prepared_captured_and_committed_in_turn() -> None:
    group = FakeRanks()

    run(group)

    assert group.moves[1:] == [
        (action, graph) for graph in ORDER for action in ("prepare", "capture", "commit")
    ]


def test_the_slowest_rank_gives_the_seconds_and_each_ledger_its_streams() -> None:
    group = FakeRanks()
    ledgers = make_ledgers(group)

    record = run(group, ledgers)

    assert {g: cost.seconds for g, cost in record.costs.items()} == dict.fromkeys(ORDER, 1.5)
    assert all(entry.measured == 1 for ledger in ledgers for entry in ledger.entries)


def test_a_graph_that_fails_on_one_rank_is_undone_on_all() -> None:
    group = FakeRanks(failures={(1, decode_graph(4)): "operator"})

    record = run(group)

    assert buckets(record) == (1, 2, 8, 16)
    assert record.plan.version == 2
    assert ("release", decode_graph(4)) in group.moves
    assert "rank 1" in record.rollbacks[0]
    assert "as told" in record.rollbacks[0]
    assert_all_hold(group, record.plan)


def test_a_graph_that_cannot_be_prepared_is_not_captured_anywhere() -> None:
    group = FakeRanks(unprepared={(0, decode_graph(16)): "memory"})

    record = run(group)

    assert ("capture", decode_graph(16)) not in group.moves
    assert buckets(record) == (1, 2, 4, 8)
    assert_all_hold(group, record.plan)


def test_a_rank_out_of_streams_keeps_as_many_buckets_as_it_could_capture() -> None:
    group = FakeRanks(streams=(100, 3))

    record = run(group)

    assert len(buckets(record)) == 3
    assert {1, 16} <= set(buckets(record))
    assert_all_hold(group, record.plan)


@pytest.mark.parametrize("streams", range(1, 9))
def test_two_families_share_what_the_tightest_rank_can_capture(streams: int) -> None:
    group = FakeRanks(streams=(100, streams))

    record = run(group, plan=make_plan(1, 2, 4, 8, mixed=(4, 8, 16, 32)))

    assert record.plan.num_graphs == streams
    if streams > 1:
        largest = {family.name: family.buckets[-1] for family in record.plan.families}
        assert largest == {"full decode": 8, "piecewise mixed": 32}
    assert_all_hold(group, record.plan)


def test_ledgers_contain_only_the_graphs_of_the_smaller_plan() -> None:
    group = FakeRanks(streams=(100, 3))
    ledgers = make_ledgers(group)

    record = run(group, ledgers)

    for ledger in ledgers:
        assert {entry.term for entry in ledger.entries} == set(map(str, record.costs))
        assert sum(entry.measured or 0 for entry in ledger.entries) == 3


def test_a_new_plan_is_adopted_before_capture_goes_on() -> None:
    group = FakeRanks(failures={(0, decode_graph(16)): "memory"})

    record = run(group)

    actions = [action for action, _ in group.moves]
    assert actions.count("adopt") == 2
    assert actions.index("release") < len(actions) - 1 - actions[::-1].index("adopt")
    assert_all_hold(group, record.plan)


def test_a_timeout_gives_up_and_names_the_rank() -> None:
    group = FakeRanks(failures={(1, decode_graph(8)): "timeout"})

    with pytest.raises(CaptureError, match="rank 1"):
        run(group)


def test_capture_gives_up_when_no_bucket_is_left() -> None:
    group = FakeRanks(failures={(0, graph): "operator" for graph in ORDER})

    with pytest.raises(CaptureError, match="no other bucket"):
        run(group)

    assert all(state.captured == set() for state in group.states)


def test_a_rank_that_holds_another_plan_is_named() -> None:
    with pytest.raises(RankDisagreementError, match="rank 1"):
        run(FakeRanks(holds_another_plan=1))


def test_ranks_that_captured_different_operators_find_out_and_leave_nothing() -> None:
    group = FakeRanks((9, 9, 9), digests={(2, decode_graph(8)): "something else"})

    with pytest.raises(RankDisagreementError, match=r"rank 2 .*captured other operators for full"):
        run(group)

    assert ("commit", decode_graph(8)) not in group.moves
    assert all(decode_graph(8) not in state.captured for state in group.states)


def test_a_rank_that_does_not_get_its_streams_back_ends_the_start() -> None:
    group = FakeRanks(failures={(1, decode_graph(8)): "operator"}, leaks=0)

    with pytest.raises(CaptureError, match="rank 0 did not get back 1 streams"):
        run(group)


def test_a_rank_that_does_not_get_its_bytes_back_ends_the_start() -> None:
    group = FakeRanks(failures={(1, decode_graph(8)): "operator"}, keeps_bytes=0)

    with pytest.raises(CaptureError, match="rank 0 did not get back 0 streams and 512 bytes"):
        run(group)


def test_ranks_whose_device_does_not_count_prove_their_bytes_alone() -> None:
    group = FakeRanks(failures={(1, decode_graph(8)): "operator"}, leaks=0, counts=False)

    assert buckets(run(group)) == (1, 2, 4, 16)


def test_groups_that_fail_at_different_graphs_end_with_one_plan() -> None:
    plan = make_plan(1, 2, 4, 8)
    groups = [
        FakeRanks(failures={(0, decode_graph(2)): "operator"}),
        FakeRanks(failures={(1, decode_graph(4)): "operator"}),
        FakeRanks(),
    ]
    records = [run(group, plan=plan) for group in groups]

    def capture_again(index: int, plan: GraphPlan) -> CaptureRecord:
        GraphTransaction(groups[index], 1.0, 1.0).release(records[index].plan.capture_order)
        records[index] = run(groups[index], plan=plan)
        return records[index]

    agree(records, capture_again)

    assert [buckets(record) for record in records] == [(1, 8)] * 3
    for group in groups:
        assert_all_hold(group, records[0].plan)


@pytest.mark.parametrize("action", ["adopt", "commit", "release"])
def test_a_failed_adopt_commit_or_release_ends_the_start_and_names_the_rank(action: Any) -> None:
    group = FakeRanks(failures={(0, decode_graph(8)): "operator"}, breaks=(1, action))

    with pytest.raises(WorkerError, match=f"rank 1 in CAPTURING: {action} of .*: as told"):
        run(group)
