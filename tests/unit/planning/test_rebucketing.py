"""A series of single captures and releases adapts a plan to the traffic. Meanwhile, every batch
size that had a graph keeps one.
"""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import GraphConfig
from dist_aclgraph.errors import GraphError
from dist_aclgraph.planning.buckets import GraphFamily, stepped_sizes
from dist_aclgraph.planning.budget import (
    BucketProbe,
    StreamOffer,
    Workload,
    make_budget_model,
    total,
)
from dist_aclgraph.planning.choice import expected_cost
from dist_aclgraph.planning.negotiation import negotiate, tightest_limits
from dist_aclgraph.planning.plan import CaptureFailure, GraphPlan
from dist_aclgraph.planning.rebucketing import (
    MAX_REASONS,
    Action,
    Capture,
    Release,
    choose_again,
    propose,
    reunite,
    transition,
)
from dist_aclgraph.planning.traffic import Traffic
from tests.plans import decode_graph
from tests.plans import make_plan as plan_of

MODEL = partial(make_budget_model, "cann-pinned")
# each piecewise bucket needs 4 stream ids
WORKLOAD = Workload(num_layers=3, mode="FULL_AND_PIECEWISE")
SIZES = tuple(stepped_sizes(64))
FAMILIES = (
    GraphFamily(run_mode="FULL", query_len=1, buckets=SIZES),
    GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=SIZES),
)


def apply(plan: GraphPlan, action: Action) -> GraphPlan:
    graph = action.graph
    families = []
    for family in plan.families:
        buckets = set(family.buckets)
        if family.is_kind_of(graph):
            change = buckets.add if isinstance(action, Capture) else buckets.discard
            change(graph.num_tokens)
        families.append(msgspec.structs.replace(family, buckets=tuple(sorted(buckets))))
    return msgspec.structs.replace(plan, version=plan.version + 1, families=tuple(families))


def make_plan(decode: tuple[int, ...], mixed: tuple[int, ...], version: int = 1) -> GraphPlan:
    families = tuple(
        msgspec.structs.replace(family, buckets=buckets)
        for family, buckets in zip(FAMILIES, (decode, mixed), strict=True)
    )
    return GraphPlan(
        version=version,
        mode="FULL_AND_PIECEWISE",
        families=families,
        max_num_seqs=64,
        budget_model="cann-pinned",
    )


def streams(plan: GraphPlan) -> int:
    offer = StreamOffer(rank=0, available=0)
    return sum(
        len(family.buckets) * total(MODEL(WORKLOAD).price(family, offer))
        for family in plan.families
    )


bucket_sets = st.sets(st.sampled_from(SIZES[:-1])).map(lambda s: (*sorted(s), SIZES[-1]))
plans = st.builds(make_plan, bucket_sets, bucket_sets)


def run(old: GraphPlan, actions: tuple[Action, ...]) -> list[GraphPlan]:
    """Carry out the actions on the plan ``old``; return the old plan, and the plan after each
    action.
    """
    found = [old]
    for action in actions:
        found.append(apply(found[-1], action))
    return found


@given(plans, plans, st.integers(0, 40))
def test_every_step_keeps_the_budget_and_the_reach_of_each_family(old, new, spare) -> None:
    available = max(streams(old), streams(new)) + spare
    offer = StreamOffer(rank=0, available=available)

    actions = transition(old, new, [offer], MODEL(WORKLOAD))

    steps = run(old, actions)
    assert steps[-1].families == new.families
    for step in steps:
        assert streams(step) <= available
        assert [family.buckets[-1] for family in step.families] == [SIZES[-1]] * 2
    changed = [action.graph for action in actions]
    assert len(changed) == len(set(changed))
    captured = [action.graph for action in actions if isinstance(action, Capture)]
    assert captured == [g for g in new.capture_order if g not in old.capture_order]
    # A graph is released before a capture only if there is no room for this capture.
    for before, action, after in zip(steps, actions, actions[1:], strict=False):
        if isinstance(action, Release) and isinstance(after, Capture):
            assert streams(apply(before, after)) > available


def test_a_plan_that_loses_reach_is_no_way_to_go() -> None:
    old, lower = make_plan((8, 64), (64,)), make_plan((8, 32), (64,))
    offers = [StreamOffer(rank=0, available=99)]

    with pytest.raises(GraphError, match="lacks a family or the largest bucket"):
        transition(old, lower, offers, MODEL(WORKLOAD))


histograms = st.dictionaries(st.integers(1, 64), st.floats(1, 1e4), max_size=12)


@given(plans, histograms, histograms, st.integers(0, 30), st.floats(0, 0.5))
def test_a_proposal_saves_what_was_asked_for_and_is_paid_for(old, decode, mixed, spare, min_gain):
    traffic = Traffic(decode=decode, mixed=mixed)
    offers = [StreamOffer(rank=0, available=streams(old) + spare)]

    new = propose(old, traffic, offers, FAMILIES, MODEL(WORKLOAD), min_gain=min_gain, min_weight=0)

    if new is None:
        return
    assert new.version == old.version + 1 and new.reasons[: len(old.reasons)] == old.reasons
    assert streams(new) <= streams(old) + spare
    assert [f.buckets[-1] for f in new.families] == [f.buckets[-1] for f in old.families]
    assert propose(new, traffic, offers, FAMILIES, MODEL(WORKLOAD), min_weight=0) is None


def test_traffic_that_moved_moves_the_buckets() -> None:
    """The plan has five decode buckets for small batches. Now, batches have about 50 requests."""
    family = FAMILIES[0]
    offers = [StreamOffer(rank=0, available=5)]
    workload = Workload(num_layers=3)
    old = negotiate(offers, [family], MODEL(workload), max_num_seqs=64)
    traffic = Traffic(decode=dict.fromkeys(range(45, 57), 100.0))

    new = propose(old, traffic, offers, [family], MODEL(workload))

    assert new is not None
    cost = [
        expected_cost(plan.families[0].buckets, traffic.decode, {s: s for s in SIZES})
        for plan in (old, new)
    ]
    assert cost[1] < cost[0]
    assert {48, 56, 64} <= set(new.families[0].buckets)
    actions = transition(old, new, offers, MODEL(workload))
    assert isinstance(actions[0], Release)  # the capture needs the released graph's streams


def test_a_little_traffic_or_a_little_gain_changes_nothing() -> None:
    old = make_plan((8, 64), (64,))
    offers = [StreamOffer(rank=0, available=streams(old))]
    few = Traffic(decode={32: 10.0})
    many = Traffic(decode={32: 1000.0})

    assert propose(old, few, offers, FAMILIES, MODEL(WORKLOAD)) is None
    assert propose(old, many, offers, FAMILIES, MODEL(WORKLOAD)) is not None
    assert propose(old, many, offers, FAMILIES, MODEL(WORKLOAD), min_gain=0.9) is None


def test_a_family_that_was_given_up_stays_so_and_sizes_do_not_grow() -> None:
    """A new plan has only families of the old plan, and no size above the old plan's sizes."""
    plan = make_plan((8, 32), (64,))
    plan = msgspec.structs.replace(plan, families=plan.families[:1])
    offers = [StreamOffer(rank=0, available=900)]

    new = propose(plan, Traffic(decode={16: 1000.0}), offers, FAMILIES, MODEL(WORKLOAD))

    assert new is not None
    assert [family.buckets for family in new.families] == [(1, 2, 4, 8, 16, 24, 32)]


causes = st.sampled_from(["streams", "memory", "operator"])


@given(plans, histograms, st.data(), causes, st.booleans())
def test_a_bucket_whose_capture_failed_is_not_proposed_again(
    old, decode, data, cause, is_serving
) -> None:
    """The budget model assumes more streams than the device has, so only failed captures show the
    true limit.
    """
    offers = [StreamOffer(rank=0, available=900)]
    failed = data.draw(st.sampled_from(old.capture_order))
    if is_serving:
        left = old.without(CaptureFailure(failed, 0, cause))
    else:
        left = old.shrink(failed, cause, 0)

    new = propose(left, Traffic(decode=decode), offers, FAMILIES, MODEL(WORKLOAD), min_weight=0)

    for was, before in ((w, b) for w in old.families for b in left.families if w.name == b.name):
        family = next((f for f in (new or left).families if f.name == before.name), before)
        assert not set(before.refused) & set(family.buckets)
        is_limited = len(before.buckets) < len(was.buckets) and not before.refused
        assert not is_limited or len(family.buckets) <= len(before.buckets)
    if is_serving or cause == "operator":
        assert failed not in (new or left).capture_order


def test_a_plan_that_is_chosen_again_and_again_does_not_grow() -> None:
    families, workload = FAMILIES[:1], Workload(num_layers=3)
    offers = [StreamOffer(rank=0, available=3)]
    plan = negotiate(offers, families, MODEL(workload), max_num_seqs=64)

    for batch in (10, 30, 50) * MAX_REASONS:
        traffic = Traffic(decode={batch: 500.0})
        plan = propose(plan, traffic, offers, families, MODEL(workload)) or plan

    assert plan.version > MAX_REASONS
    assert len(plan.reasons) == MAX_REASONS


def test_step_times_make_no_graph_free_that_could_not_be_probed() -> None:
    family = FAMILIES[0]
    probe = BucketProbe(graph=family.describe(64, 64), streams=2, bytes=640)
    offers = [StreamOffer(rank=0, available=16, probes=(probe,))]
    calibrated = partial(make_budget_model, "calibrated")
    plan = negotiate(offers, FAMILIES, calibrated(WORKLOAD), max_num_seqs=64)
    times = {graph: 0.01 + graph.num_tokens for graph in plan.capture_order}

    found = choose_again(
        plan,
        Traffic(decode={3: 500.0, 5: 500.0}, mixed=dict.fromkeys(range(1, 60, 3), 100.0)),
        offers,
        times,
        FAMILIES,
        calibrated(WORKLOAD),
        GraphConfig(),
    )

    assert found is not None
    better, _ = found
    counts = [len(family.buckets) for family in better.families]
    assert all(
        item.limit.admits(counts)
        for item in tightest_limits(offers, FAMILIES, calibrated(WORKLOAD))
    )


@pytest.mark.parametrize(("spare", "kept"), [(1, {8, 16, 64}), (0, {16, 64})])
def test_a_size_is_released_only_if_another_size_needs_its_streams(spare, kept) -> None:
    """Steps of the sizes 8 and 16 take equally long. Batches have 20 to 32 requests."""
    family, workload = FAMILIES[0], Workload(num_layers=3)
    probe = BucketProbe(graph=family.describe(64, 64), streams=1, bytes=640, replay_s=4.0)
    old = msgspec.structs.replace(make_plan((8, 16, 64), (64,)), families=())
    families = (msgspec.structs.replace(family, buckets=(8, 16, 64)),)
    old = msgspec.structs.replace(old, families=families)
    offers = [StreamOffer(rank=0, available=3 + spare, probes=(probe,))]
    wanted = msgspec.structs.replace(family, buckets=(8, 16, 32, 64))

    found = choose_again(
        old,
        Traffic(decode=dict.fromkeys(range(20, 33), 100.0)),
        offers,
        {family.describe(size, size): 1.0 for size in (8, 16)},
        [wanted],
        MODEL(workload),
        GraphConfig(),
    )

    assert found is not None
    new, actions = found
    assert set(new.families[0].buckets) == {32, *kept}
    assert [a.graph.num_tokens for a in actions if isinstance(a, Capture)] == [32]


def test_groups_that_differ_come_to_what_all_have_and_forget_no_refusal() -> None:
    first = plan_of(1, 8, 32, mixed=(16, 64), version=4)
    failure = CaptureFailure(decode_graph(8), 1, "streams")
    second = first.without(failure)

    common = reunite([first, second])

    assert common.version == second.version + 1
    assert [family.buckets for family in common.families] == [(1, 32), (16, 64)]
    assert common.families[0].refused == (8,)
    assert set(common.capture_order) <= set(first.capture_order) & set(second.capture_order)
    assert reunite([second, first]) == common
