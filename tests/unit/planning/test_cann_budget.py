"""CANN's accounting of streams: the number of streams that the lanes of a bucket's graphs need.
This number depends on the kind of graph and on the communication domains.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import StreamBudgetError
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget import (
    BucketProbe,
    StreamOffer,
    Workload,
    make_budget_model,
    streams_per_graph,
    total,
)
from dist_aclgraph.planning.budget.captured import shapes
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.ledger import Ledger, pool_bytes
from dist_aclgraph.planning.negotiation import negotiate

PINNED, SOFTWARE, CALIBRATED = (
    partial(make_budget_model, name) for name in ("cann-pinned", "cann-software-sq", "calibrated")
)
OFFER = StreamOffer(rank=0, available=2000)
DECODE = GraphFamily(run_mode="FULL", query_len=1, buckets=(1, 4, 8))
PIECES = GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=(1, 4, 8))


def price(family: GraphFamily, workload: Workload) -> int:
    return total(PINNED(workload).price(family, OFFER))


def lanes(family: GraphFamily, workload: Workload) -> list[tuple[int, ...]]:
    return [shape.lanes for shape in shapes(family, workload) for _ in range(shape.copies)]


def test_lanes_are_as_long_as_dumps_of_captured_graphs_show() -> None:
    """Lengths of lanes are numbers of entries. They were counted on the emulator, for 4 layers of
    Qwen3.

    A wait for updated parameters has four entries, and the reset of the wait has four entries.
    """
    alone, pair = Workload(num_layers=4), Workload(num_layers=4, tp=2)

    assert lanes(DECODE, alone) == [(95,)]
    assert lanes(DECODE, pair) == [(125, 40)]
    assert lanes(PIECES, alone) == [(10,), (12,), (12,), (12,), (6,)]
    assert lanes(PIECES, pair) == [(20, 4), (16, 8), (16, 8), (16, 8), (10, 8)]


def test_without_updates_a_bucket_has_a_shorter_graph_for_each_kv_length() -> None:
    """``make perf-gate`` counts 66 launches in the graph of one KV length."""
    padded = Workload(num_layers=4, mode="FULL_AND_PIECEWISE", num_kv_sizes=3)

    assert lanes(DECODE, padded) == 3 * [(66,)]
    assert lanes(PIECES, padded) == lanes(PIECES, replace(padded, num_kv_sizes=0))


def test_norms_over_the_heads_of_several_ranks_add_entries_before_attention() -> None:
    pair, norms = (Workload(num_layers=4, tp=2, sums_norms=sums) for sums in (False, True))
    # In each layer, the main lane gets ten operators, a record and a wait. HCCL's lane gets the
    # four entries of the collective.
    main, side = 10 + 2, 4

    [(length, hccl)] = lanes(DECODE, pair)
    assert lanes(DECODE, norms) == [(length + 4 * main, hccl + 4 * side)]
    *before, last = lanes(PIECES, pair)
    assert lanes(PIECES, norms) == [*((a + main, b + side) for a, b in before), last]


def test_the_price_of_a_bucket_equals_its_streams_on_the_emulator() -> None:
    alone, pair = Workload(num_layers=4), Workload(num_layers=4, tp=2)

    assert (price(DECODE, alone), price(PIECES, alone)) == (1, 5)
    assert (price(DECODE, pair), price(PIECES, pair)) == (4, 20)


@pytest.mark.parametrize(("layers", "queues"), [(91, 1), (92, 2), (182, 2), (183, 3)])
def test_a_lane_longer_than_a_queue_takes_another(layers: int, queues: int) -> None:
    # A graph has 22 entries for each layer, and 7 other entries.
    assert price(DECODE, Workload(num_layers=layers)) == queues


workloads = st.builds(
    Workload,
    num_layers=st.integers(1, 100),
    moe=st.booleans(),
    tp=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([1, 4]),
    pcp=st.sampled_from([1, 2]),
    expansion=st.sampled_from(["AIV", "AICPU", "FFTS"]),
    multistream_shared=st.booleans(),
    draft_layers=st.integers(0, 2),
    query_len=st.integers(1, 3),
)
families = st.sampled_from([DECODE, PIECES])


@given(workloads, families)
def test_a_piecewise_bucket_has_a_graph_more_than_layers_and_takes_one_id_each(workload, family):
    found = shapes(family, workload)

    graphs = sum(shape.copies for shape in found)
    expected = 1 + (workload.draft_layers > 0)
    if family is PIECES:
        expected = workload.num_layers + 1
    assert graphs == expected
    assert price(family, workload) >= graphs


@given(workloads, families)
def test_copies_of_a_dense_model_that_never_meet_cost_nothing(workload, family) -> None:
    assert price(family, workload) == price(family, replace(workload, dp=1))


@given(workloads.filter(lambda w: w.pcp == 1 and w.tp == 8))
def test_two_names_for_one_rank_set_cost_streams_once(workload) -> None:
    plain = replace(workload, dp=1, moe=True)
    within = replace(plain, dcp=8, ep=8)

    for family in (DECODE, PIECES):
        terms = {t.name: t.total for t in PINNED(plain).price(family, OFFER)}
        same = {t.name: t.total for t in PINNED(within).price(family, OFFER)}
        assert {k: v for k, v in same.items() if "cascade" not in k} == {
            k: v for k, v in terms.items() if "cascade" not in k
        }


def test_an_expert_domain_of_its_own_is_priced_where_experts_run() -> None:
    dense = Workload(num_layers=10, tp=2, dp=2)
    experts = Workload(num_layers=10, tp=2, dp=2, ep=4, moe=True)
    more = 1 + streams_per_graph("FFTS")

    assert price(DECODE, experts) - price(DECODE, dense) == more
    # The first piece contains only the embedding and no experts.
    assert price(PIECES, experts) - price(PIECES, dense) == 10 * more
    # AICPU increases the number of streams of a domain, but not of the graphs that use the domain.
    assert price(PIECES, replace(experts, expansion="AICPU")) == price(PIECES, experts)


def test_shards_of_caches_meet_inside_full_graphs_and_between_pieces() -> None:
    plain, sharded = Workload(num_layers=4, tp=4), Workload(num_layers=4, tp=4, dcp=2)

    assert price(DECODE, sharded) > price(DECODE, plain)
    assert price(PIECES, sharded) == price(PIECES, plain)


def test_lanes_grow_with_what_shards_exchange() -> None:
    # ``with_tp``: the DCP group uses the domain of TP. ``both``: the DCP group has a separate
    # domain. ``alone``: the DCP group has the ranks of PCP, so all of its ranks have the same
    # heads.
    with_tp = Workload(num_layers=4, tp=2, dcp=2)
    alone = Workload(num_layers=4, pcp=2, dcp=2)
    both = Workload(num_layers=4, tp=2, pcp=2, dcp=4)

    assert lanes(DECODE, with_tp) == [(125 + 4 * (16 + 4), 40 + 4 * 8)]
    assert lanes(DECODE, alone) == [(95 + 4 * (16 + 2), 4 * 4)]
    assert sorted(lanes(DECODE, both)[0]) == sorted((125 + 4 * (16 + 4), 40, 4 * 8))


def test_ranks_that_split_prompts_meet_in_no_graph() -> None:
    plain, split = Workload(num_layers=4), Workload(num_layers=4, pcp=2)

    assert price(DECODE, split) == price(DECODE, plain)
    assert price(PIECES, split) == price(PIECES, plain)


def test_shared_experts_beside_the_main_lane_cost_a_lane() -> None:
    plain = Workload(num_layers=4, moe=True)
    beside = Workload(num_layers=4, moe=True, multistream_shared=True)

    assert price(DECODE, beside) == price(DECODE, plain) + 1
    assert price(PIECES, beside) == price(PIECES, plain) + 4


def test_layers_of_experts_are_longer_lanes() -> None:
    dense = Workload(num_layers=61, tp=8, dp=4, ep=32)
    experts = replace(dense, moe=True)

    # In the dense model, each of 61 layers has 12 + 10 + 4 entries. Together with 23 other entries,
    # they fit in one queue. Experts on other ranks add 58 entries to each layer, of which 4 are for
    # exchanges. Then two more queues are needed.
    assert price(DECODE, experts) == price(DECODE, dense) + 2
    # With all_gather, experts add 29 entries to each layer, of which 4 are for exchanges. Then one
    # more queue is needed.
    assert price(DECODE, replace(experts, exchange="all_gather")) == price(DECODE, dense) + 1


def test_experts_inside_a_tensor_parallel_group_have_no_collectives_of_their_own() -> None:
    inside = Workload(num_layers=61, tp=8, ep=8, moe=True)
    ((domain, count),) = shapes(DECODE, inside)[0].collectives

    assert (domain.num_ranks, count) == (8, 2 * 61 + 2)


@given(workloads, families, st.integers(0, 4000))
def test_with_software_queues_capture_takes_ids_all_the_same(workload, family, available) -> None:
    offer = StreamOffer(rank=0, available=available)

    assert SOFTWARE(workload).price(family, offer) == PINNED(workload).price(family, offer)
    limits = SOFTWARE(workload).limits([family], offer)
    for count in (0, 1, 7, 30):
        fits = all(limit.admits([count]) for limit in limits)
        assert fits == (count * price(family, workload) <= available)


def test_a_graph_wider_than_all_queues_is_not_planned() -> None:
    deep = Workload(num_layers=100_000, mode="FULL_AND_PIECEWISE")
    offer = StreamOffer(rank=0, available=1_000_000)

    plan = negotiate([offer], [DECODE, PIECES], SOFTWARE(deep))

    assert [family.name for family in plan.families] == ["piecewise mixed"]
    with pytest.raises(StreamBudgetError, match="graph of more than 1024 queues"):
        negotiate([offer], [DECODE], SOFTWARE(deep))


def probe_of(family: GraphFamily, streams: int, num_bytes: int) -> BucketProbe:
    return BucketProbe(graph=family.describe(8, 8), streams=streams, bytes=num_bytes)


def test_a_device_that_does_not_count_graphs_is_priced_by_pinned_ids() -> None:
    offer = StreamOffer(
        rank=0, available=9, counts_graphs=False, probes=(probe_of(DECODE, 0, 800),)
    )
    workload = Workload(num_layers=4, tp=2)

    price = CALIBRATED(workload).price(DECODE, offer)

    assert total(price) == 4
    assert all("count does not follow graphs: cann-pinned" in term.why for term in price)
    assert CALIBRATED(workload).bytes_per_token(DECODE, offer) == 100


def test_the_ledger_warns_if_a_device_does_not_count_streams_of_graphs() -> None:
    offer, workload = StreamOffer(rank=5, available=9, counts_graphs=False), Workload(num_layers=4)
    plan = negotiate([offer], [DECODE], PINNED(workload))
    ledger = Ledger.predict(offer, plan, PINNED(workload))

    ledger.measure("full decode 8", 0)

    assert all(entry.measured is None for entry in ledger.entries)
    assert ledger.warnings() == [
        "rank 5: streams of graphs are not measured: this device's count does not follow them"
    ]


def test_a_probe_prices_its_family_in_streams_and_bytes() -> None:
    workload = Workload(num_layers=4, mode="FULL_AND_PIECEWISE")
    probes = (probe_of(DECODE, 7, 800),)
    offer = StreamOffer(rank=3, available=26, free_bytes=500, probes=probes)

    plan = negotiate([offer], [DECODE, PIECES], CALIBRATED(workload))

    decode, pieces = plan.families
    assert decode.buckets in ((4,), (1, 4))  # size 8 would need 800 bytes, and 500 are free
    assert 7 * len(decode.buckets) + 5 * len(pieces.buckets) <= 26
    (term,) = CALIBRATED(workload).price(DECODE, offer)
    assert (term.name, term.total, term.why) == ("probed", 7, "what full decode 8 took on rank 3")
    assert all(
        "not probed: cann-pinned" in t.why for t in CALIBRATED(workload).price(PIECES, offer)
    )
    assert pool_bytes(plan, offer, CALIBRATED(workload)) == 400


def test_a_slow_probe_makes_its_step_dear() -> None:
    """If the probes of all sizes measure the same time, small buckets save nothing."""
    workload = Workload(num_layers=4)
    timed = [
        BucketProbe(graph=BatchDescriptor(b, b, 1, "FULL"), streams=1, bytes=0, replay_s=0.01)
        for b in DECODE.buckets
    ]
    offer = StreamOffer(rank=0, available=99, probes=tuple(timed))

    plan = negotiate([offer], [DECODE], CALIBRATED(workload))

    assert plan.families[0].buckets == (8,)


def test_seconds_of_one_family_are_not_weighed_against_tokens_of_the_other() -> None:
    workload = Workload(num_layers=4, mode="FULL_AND_PIECEWISE")
    slow = BucketProbe(graph=DECODE.describe(8, 8), streams=1, bytes=0, replay_s=1e6)
    timed, untimed = (
        StreamOffer(rank=0, available=12, probes=(probe,))
        for probe in (slow, BucketProbe(graph=slow.graph, streams=1, bytes=0))
    )

    plans = [negotiate([o], [DECODE, PIECES], CALIBRATED(workload)) for o in (timed, untimed)]

    assert plans[0] == plans[1]
    assert plans[1].num_graphs < 6


def test_every_line_of_a_price_reaches_the_ledger() -> None:
    workload = Workload(num_layers=4, tp=2, mode="FULL_AND_PIECEWISE")
    plan = negotiate([OFFER], [DECODE, PIECES], PINNED(workload))

    ledger = Ledger.predict(OFFER, plan, PINNED(workload))

    assert ledger.predicted_streams == 3 * 4 + 3 * 20
    assert ledger.terms["full decode: graph: HCCL lanes"] == 1
    assert ledger.terms["piecewise mixed: pieces between: domains"] == 6
