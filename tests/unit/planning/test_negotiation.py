"""Laws of negotiation: all ranks get the same plan, every rank has enough streams and bytes for it,
and no other such plan has a lower cost.
"""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.planning.buckets import GraphFamily, capture_sizes
from dist_aclgraph.planning.budget import Workload, make_budget_model, share_cards, total
from dist_aclgraph.planning.choice import expected_cost
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.negotiation import StreamOffer, keep_room, negotiate
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import weights_of
from tests.plans import choose

MODEL = partial(make_budget_model, "legacy-last")
WORKLOAD = Workload(num_layers=4, tp=2)  # costs 40 streams once, and 3 streams for each bucket


def decode_family(*sizes: int) -> GraphFamily:
    return GraphFamily(run_mode="FULL", query_len=1, buckets=sizes)


def piecewise_family(*sizes: int) -> GraphFamily:
    return GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=sizes)


def buckets_of(plan: GraphPlan) -> list[tuple[int, ...]]:
    return [family.buckets for family in plan.families]


offer_lists = st.lists(
    st.builds(
        dict,
        available=st.integers(0, 2048),
        reserve=st.integers(0, 64),
        free_bytes=st.integers(0, 1 << 20),
        card=st.sampled_from(["", "", "0"]),
        max_sizes=st.sampled_from([None, None, 4]),
    ),
    min_size=1,
    max_size=8,
).map(lambda offers: [StreamOffer(rank=rank, **o) for rank, o in enumerate(offers)])
size_sets = st.sets(st.integers(1, 512), min_size=1, max_size=20).map(sorted)
families_by_mode = {
    "PIECEWISE": st.tuples(size_sets.map(lambda s: piecewise_family(*s))),
    "FULL_DECODE_ONLY": st.tuples(size_sets.map(lambda s: decode_family(*s))),
    "FULL_AND_PIECEWISE": st.tuples(
        size_sets.map(lambda s: decode_family(*s)), size_sets.map(lambda s: piecewise_family(*s))
    ),
}
workloads = st.builds(
    Workload,
    num_layers=st.integers(1, 64),
    mode=st.sampled_from(list(families_by_mode)),
    tp=st.sampled_from([1, 2]),
    expansion=st.sampled_from(["AIV", "AICPU"]),
    bytes_per_token=st.sampled_from([0, 0, 4096]),
)


@given(offer_lists, workloads, st.data(), st.randoms())
def test_a_plan_is_affordable_and_blind_to_the_order_of_offers(offers, workload, data, rng):
    families = data.draw(families_by_mode[workload.mode])
    shuffled = rng.sample(offers, len(offers))
    try:
        plan = negotiate(offers, families, MODEL(workload))
    except StreamBudgetError as e:
        with pytest.raises(StreamBudgetError) as again:
            negotiate(shuffled, families, MODEL(workload))
        assert str(again.value) == str(e)
        return

    assert negotiate(shuffled, families, MODEL(workload)).hash == plan.hash
    for offer in offers:
        on_card = sum(o.card == offer.card for o in offers) if offer.card else 1
        usable = offer.available // on_card - offer.reserve
        assert sum(g.mode == "FULL" for g in plan.capture_order) <= usable
        pieces = [g for g in plan.capture_order if g.mode == "PIECEWISE"]
        assert len(pieces) * (workload.num_layers + 1) <= usable
        assert offer.max_sizes is None or len(pieces) <= offer.max_sizes
        largest = plan.capture_order[0].num_tokens
        assert largest * workload.bytes_per_token <= offer.free_bytes
    for family in plan.families:
        wanted = next(f for f in families if f.name == family.name)
        assert set(family.buckets) <= set(wanted.buckets)
        assert workload.bytes_per_token or family.buckets[-1] == wanted.buckets[-1]


small_sets = st.sets(st.integers(1, 40), min_size=1, max_size=7).map(sorted)


@given(small_sets, small_sets, st.integers(2, 40), st.integers(1, 4))
def test_two_families_share_one_budget_at_the_least_cost(decode, mixed, available, num_layers):
    workload = Workload(num_layers=num_layers, mode="FULL_AND_PIECEWISE")
    families = (decode_family(*decode), piecewise_family(*mixed))
    offer = StreamOffer(rank=0, available=available)
    weights = weights_of(None, families)

    def cost(chosen) -> float:
        return sum(
            expected_cost(b, w, {s: s for s in b}) for b, w in zip(chosen, weights, strict=True)
        )

    affordable = [
        (d, m)
        for d, m in product(range(1, len(decode) + 1), range(1, len(mixed) + 1))
        if all(limit.admits((d, m)) for limit in MODEL(workload).limits(families, offer))
    ]
    if not affordable:
        return

    plan = negotiate([offer], families, MODEL(workload))

    best = min(
        cost(
            [
                choose(sizes, w, sizes, n)
                for sizes, w, n in zip((decode, mixed), weights, counts, strict=True)
            ]
        )
        for counts in affordable
    )
    assert cost(buckets_of(plan)) == pytest.approx(best)


def test_the_tightest_rank_decides_for_all() -> None:
    offers = [
        StreamOffer(rank=0, available=2016, reserve=32),
        StreamOffer(rank=1, available=37, reserve=32),
    ]

    plan = negotiate(offers, [decode_family(*capture_sizes(32, 512))], MODEL(WORKLOAD))

    assert buckets_of(plan) == [(2, 8, 16, 24, 32)]
    assert [graph.num_tokens for graph in plan.capture_order] == [32, 24, 16, 8, 2]
    assert plan.reasons == (
        "rank 1 affords 5 of 7 full decode sizes by legacy-last, having 5 streams for graphs",
    )


def test_where_both_families_do_not_fit_the_cheaper_one_stays() -> None:
    # each piecewise bucket needs 5 streams
    workload = Workload(num_layers=4, mode="FULL_AND_PIECEWISE")
    families = (decode_family(1, 2), piecewise_family(1, 2))

    plan = negotiate([StreamOffer(rank=0, available=4)], families, MODEL(workload))

    assert [family.name for family in plan.families] == ["full decode"]
    assert "rank 0 affords 0 of 2 piecewise mixed sizes" in plan.reasons[1]


def test_a_rank_that_affords_nothing_is_named_with_its_shortfall() -> None:
    offers = [StreamOffer(rank=0, available=2016), StreamOffer(rank=3, available=32, reserve=32)]

    with pytest.raises(StreamBudgetError) as caught:
        negotiate(offers, [decode_family(1, 8)], MODEL(WORKLOAD))

    assert "rank 3 offers 0 streams" in str(caught.value)
    assert "one full decode bucket needs 1 of 0 streams for graphs" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_an_error_about_very_many_ranks_stays_readable() -> None:
    offers = [StreamOffer(rank=rank, available=0) for rank in range(4096)]

    with pytest.raises(StreamBudgetError, match="and 4088 other ranks") as caught:
        negotiate(offers, [decode_family(1, 8)], MODEL(WORKLOAD))

    assert len(str(caught.value)) < 2000


def test_sizes_that_outgrow_memory_are_dropped_with_a_reason() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)
    offers = [StreamOffer(rank=0, available=2000, free_bytes=1650)]

    plan = negotiate(offers, [decode_family(1, 8, 16, 32)], MODEL(workload))

    assert buckets_of(plan) == [(1, 8, 16)]
    assert plan.reasons[0] == "full decode sizes above 16 need more than the 1650 bytes of rank 0"


def test_memory_for_not_even_the_smallest_bucket_is_an_error() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)
    offers = [StreamOffer(rank=0, available=99, free_bytes=100)]

    with pytest.raises(StreamBudgetError, match="costs 400, 300 too many"):
        negotiate(offers, [decode_family(4)], MODEL(workload))


def test_mode_none_plans_no_bucket_and_asks_for_no_stream() -> None:
    plan = negotiate(
        [StreamOffer(rank=0, available=0)], [], MODEL(Workload(num_layers=4, mode="NONE"))
    )

    assert plan.families == ()


@pytest.mark.parametrize("ranks", [[], [0, 0]])
def test_each_rank_offers_once(ranks: list[int]) -> None:
    offers = [StreamOffer(rank=r, available=99) for r in ranks]

    with pytest.raises(GraphError, match="one offer of each rank"):
        negotiate(offers, [decode_family(1)], MODEL(WORKLOAD))


@pytest.mark.parametrize("families", [[], [decode_family()]])
def test_without_candidate_sizes_there_is_nothing_to_choose(families) -> None:
    with pytest.raises(GraphError, match="no candidate sizes"):
        negotiate([StreamOffer(rank=0, available=99)], families, MODEL(WORKLOAD))


def test_offers_and_plans_travel_as_json_and_messagepack() -> None:
    offer = StreamOffer(rank=1, available=70, taken={"default stream": 1}, max_sizes=4)
    plan = negotiate([offer], [decode_family(1, 2, 8)], MODEL(WORKLOAD))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=StreamOffer) == offer
    copies = [
        msgspec.json.decode(msgspec.json.encode(plan), type=GraphPlan),
        msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=GraphPlan),
    ]
    assert [copy.hash for copy in copies] == [plan.hash] * 2


def test_any_other_field_makes_another_hash() -> None:
    plan = negotiate(
        [StreamOffer(rank=0, available=2000)], [decode_family(1, 2, 8)], MODEL(WORKLOAD)
    )
    others = [
        {"version": 2},
        {"mode": "FULL"},
        {"families": (decode_family(1, 8),)},
        {"families": (piecewise_family(1, 2, 8),)},
    ]

    hashes = {msgspec.structs.replace(plan, **change).hash for change in others}

    assert len(hashes | {plan.hash}) == 5


def test_the_ledger_warns_of_the_term_that_is_ten_percent_off() -> None:
    offer = StreamOffer(rank=2, available=2000)
    plan = negotiate([offer], [decode_family(1, 8)], MODEL(WORKLOAD))
    ledger = Ledger.predict(offer, plan, MODEL(WORKLOAD))

    ledger.measure("full decode 8", 3)
    ledger.measure("full decode 1", 5)
    ledger.measure("event pool", 1)

    assert ledger.warnings() == [
        "rank 2: full decode 1 took 5 streams, predicted 3 (graphs 1, communication 2); "
        "nearest to the difference of 2: communication",
        "rank 2: event pool took 1 streams, predicted 0",
    ]
    assert ledger.predicted_streams == 6
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


def test_the_pool_is_predicted_to_take_what_the_largest_bucket_does() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)
    offer = StreamOffer(rank=0, available=2000, free_bytes=5000)
    plan = negotiate([offer], [decode_family(1, 8)], MODEL(workload))
    ledger = Ledger.predict(offer, plan, MODEL(workload))

    ledger.measure("graph pool", 879, "bytes")

    assert ledger.warnings() == []
    ledger.measure("graph pool", 881, "bytes")
    assert ledger.warnings() == ["rank 0: graph pool took 881 bytes, predicted 800"]


def test_a_pool_that_the_model_does_not_know_is_measured_without_a_warning() -> None:
    offer, workload = StreamOffer(rank=0, available=2000), Workload(num_layers=4)
    plan = negotiate([offer], [decode_family(1, 8)], MODEL(workload))
    ledger = Ledger.predict(offer, plan, MODEL(workload))

    ledger.measure("graph pool", 1 << 21, "bytes")

    assert (ledger.entries[-1].predicted, ledger.entries[-1].measured) == (None, 1 << 21)
    assert ledger.warnings() == []


@given(offer_lists, workloads, st.data(), st.integers(0, 20))
def test_room_for_later_graphs_never_costs_a_rank_more_than_its_share(
    offers, workload, data, capacity
) -> None:
    families = data.draw(families_by_mode[workload.mode])

    kept, count = keep_room(offers, families, capacity, MODEL(workload))

    assert 0 <= count <= capacity
    for before, after, shared in zip(offers, kept, share_cards(offers), strict=True):
        more = after.reserve - before.reserve
        assert 0 <= more <= shared.usable // 4
        dearest = max(total(MODEL(workload).price(f, before)) for f in families)
        assert more == count * dearest
    assert keep_room(offers, [], capacity, MODEL(workload)) == (offers, 0)


def test_eight_times_as_many_offers_take_no_more_than_a_few_times_as_long_each() -> None:
    families = (decode_family(*capture_sizes(512, 512)), piecewise_family(*capture_sizes(512, 512)))
    workload = Workload(num_layers=61, moe=True, tp=16, mode="FULL_AND_PIECEWISE")

    def processor_s(num_ranks: int) -> float:
        offers = [StreamOffer(rank=r, available=1000 + r % 977) for r in range(num_ranks)]
        random.Random(0).shuffle(offers)
        start_s = time.process_time()
        assert negotiate(offers, families, MODEL(workload)).num_graphs > 2
        return time.process_time() - start_s

    few_s = min(processor_s(512) for _ in range(3))
    assert processor_s(4096) < 4 * 8 * few_s
