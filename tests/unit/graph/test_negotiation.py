"""Laws of negotiation: one plan for all, paid for by all."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.graph.buckets import capture_sizes
from dist_aclgraph.graph.budget import Workload, make_budget_model
from dist_aclgraph.graph.ledger import Ledger
from dist_aclgraph.graph.negotiation import StreamOffer, negotiate
from dist_aclgraph.graph.plan import GraphPlan

MODEL = make_budget_model("legacy-last")
WORKLOAD = Workload(num_layers=4, tp=2)  # 40 fixed, 3 streams each

offer_lists = st.lists(
    st.builds(
        dict,
        available=st.integers(0, 2048),
        reserve=st.integers(0, 64),
        free_bytes=st.integers(0, 1 << 20),
    ),
    min_size=1,
    max_size=8,
).map(lambda offers: [StreamOffer(rank=rank, **o) for rank, o in enumerate(offers)])
size_sets = st.sets(st.integers(1, 512), min_size=1, max_size=60)
workloads = st.builds(
    Workload,
    num_layers=st.integers(1, 64),
    mode=st.sampled_from(["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    tp=st.sampled_from([1, 2]),
    aiv=st.booleans(),
    bytes_per_token=st.sampled_from([0, 0, 4096]),
)


@given(offer_lists, size_sets, workloads, st.randoms())
def test_a_plan_is_affordable_and_blind_to_the_order_of_offers(offers, sizes, workload, rng):
    shuffled = rng.sample(offers, len(offers))
    try:
        plan = negotiate(offers, sorted(sizes), MODEL, workload)
    except StreamBudgetError as e:
        with pytest.raises(StreamBudgetError) as again:
            negotiate(shuffled, list(sizes), MODEL, workload)
        assert str(again.value) == str(e)
        return

    assert negotiate(shuffled, list(sizes), MODEL, workload).hash == plan.hash
    priced = msgspec.structs.asdict(plan)["buckets"]
    assert all(len(priced) <= MODEL.max_buckets(offer, workload) for offer in offers)
    assert all(len(priced) <= offer.available - offer.reserve for offer in offers)
    assert all(max(priced) * workload.bytes_per_token <= o.free_bytes for o in offers)
    if not workload.bytes_per_token:
        assert priced[-1] == max(sizes)
        assert len(priced) == 1 or priced[0] == min(sizes)


def test_the_tightest_rank_decides_for_all() -> None:
    offers = [
        StreamOffer(rank=0, available=2016, reserve=32),
        StreamOffer(rank=1, available=37, reserve=32),
    ]

    plan = negotiate(offers, capture_sizes(32), MODEL, WORKLOAD)

    assert plan.buckets == (1, 4, 8, 16, 32)
    assert plan.capture_order == (32, 16, 8, 4, 1)
    assert plan.reasons == (
        "rank 1 affords 5 of 7 sizes by legacy-last, having 5 streams for graphs",
    )


def test_a_rank_that_affords_nothing_is_named_with_its_shortfall() -> None:
    offers = [StreamOffer(rank=0, available=2016), StreamOffer(rank=3, available=32, reserve=32)]

    with pytest.raises(StreamBudgetError) as caught:
        negotiate(offers, [1, 8], MODEL, WORKLOAD)

    assert "rank 3 offers 0 streams" in str(caught.value)
    assert "one bucket costs 3" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_sizes_that_outgrow_memory_are_dropped_with_a_reason() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)
    offers = [StreamOffer(rank=0, available=2000, free_bytes=1650)]

    plan = negotiate(offers, [1, 8, 16, 32], MODEL, workload)

    assert plan.buckets == (1, 8, 16)
    assert "1650 bytes of rank 0" in plan.reasons[0]


def test_memory_for_not_even_the_smallest_bucket_is_an_error() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)

    with pytest.raises(StreamBudgetError, match="costs 400, 300 too many"):
        negotiate([StreamOffer(rank=0, available=99, free_bytes=100)], [4], MODEL, workload)


def test_mode_none_plans_no_bucket_and_asks_for_no_stream() -> None:
    plan = negotiate(
        [StreamOffer(rank=0, available=0)], [1, 2], MODEL, Workload(num_layers=4, mode="NONE")
    )

    assert plan.buckets == ()


@pytest.mark.parametrize("ranks", [[], [0, 0]])
def test_each_rank_offers_once(ranks: list[int]) -> None:
    with pytest.raises(GraphError, match="one offer of each rank"):
        negotiate([StreamOffer(rank=r, available=99) for r in ranks], [1], MODEL, WORKLOAD)


def test_without_candidate_sizes_there_is_nothing_to_choose() -> None:
    with pytest.raises(GraphError, match="no candidate sizes"):
        negotiate([StreamOffer(rank=0, available=99)], [], MODEL, WORKLOAD)


def test_offers_and_plans_travel_as_json_and_messagepack() -> None:
    offer = StreamOffer(rank=1, available=70, taken={"default stream": 1}, max_sizes=4)
    plan = negotiate([offer], [1, 2, 8], MODEL, WORKLOAD)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=StreamOffer) == offer
    copies = [
        msgspec.json.decode(msgspec.json.encode(plan), type=GraphPlan),
        msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=GraphPlan),
    ]
    assert [copy.hash for copy in copies] == [plan.hash] * 2


def test_any_other_field_makes_another_hash() -> None:
    plan = negotiate([StreamOffer(rank=0, available=2000)], [1, 2, 8], MODEL, WORKLOAD)
    others = [{"version": 2}, {"mode": "FULL"}, {"buckets": (1, 8)}, {"query_len": 2}]

    hashes = {msgspec.structs.replace(plan, **change).hash for change in others}

    assert len(hashes | {plan.hash}) == 5


def test_the_ledger_warns_of_the_term_that_is_ten_percent_off() -> None:
    offer = StreamOffer(rank=2, available=2000)
    plan = negotiate([offer], [1, 8], MODEL, WORKLOAD)
    ledger = Ledger.predict(offer, plan, MODEL, WORKLOAD)

    ledger.measure("bucket 8", 3)
    ledger.measure("bucket 1", 5)
    ledger.measure("event pool", 1)

    assert ledger.warnings() == [
        "rank 2: bucket 1 took 5 streams, predicted 3",
        "rank 2: event pool took 1 streams, predicted 0",
    ]
    assert ledger.predicted_streams == 6
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


def test_the_pool_is_predicted_to_take_what_the_largest_bucket_does() -> None:
    workload = Workload(num_layers=4, bytes_per_token=100)
    offer = StreamOffer(rank=0, available=2000, free_bytes=5000)
    ledger = Ledger.predict(offer, negotiate([offer], [1, 8], MODEL, workload), MODEL, workload)

    ledger.measure("graph pool", 879, "bytes")

    assert ledger.warnings() == []
    ledger.measure("graph pool", 881, "bytes")
    assert ledger.warnings() == ["rank 0: graph pool took 881 bytes, predicted 800"]


def test_offers_in_random_order_of_many_ranks_give_one_plan() -> None:
    offers = [StreamOffer(rank=r, available=100 + r % 7) for r in range(256)]
    random.Random(0).shuffle(offers)

    plans = {negotiate(offers, capture_sizes(64), MODEL, WORKLOAD).hash for _ in range(3)}

    assert len(plans) == 1
