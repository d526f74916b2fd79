"""The formulas of earlier releases give the recorded values, both alone and in the budget models
that use them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import make_config
from dist_aclgraph.planning.buckets import GraphFamily, trim_sizes
from dist_aclgraph.planning.budget import (
    LegacyInputs,
    StreamOffer,
    Workload,
    legacy_sizes,
    make_budget_model,
    max_buckets,
    max_piecewise_sizes,
    reserved_streams,
    share_cards,
    streams_per_domain,
    streams_per_graph,
    total,
)
from dist_aclgraph.shapes.model_facts import read_model_facts

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests" / "data" / "stream_budget_sample.jsonl"
FULL = ROOT.parent / "shared" / "oracles" / "stream_budget.jsonl"


def decode_family(num_sizes: int = 7, query_len: int = 1) -> GraphFamily:
    buckets = tuple(range(query_len, (num_sizes + 1) * query_len, query_len))
    return GraphFamily(run_mode="FULL", query_len=query_len, buckets=buckets)


def piecewise_family(num_sizes: int = 7) -> GraphFamily:
    buckets = tuple(range(1, num_sizes + 1))
    return GraphFamily(run_mode="PIECEWISE", query_len=0, buckets=buckets)


def most(model, families, workload, offer) -> int:
    """Return the largest number of buckets of the last family that all limits allow. The other
    families have no buckets.
    """
    alone = [limit.most(len(families) - 1) for limit in model(workload).limits(families, offer)]
    return min(n for n in alone if n is not None)


each_record = pytest.mark.parametrize(
    "path",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(
            FULL,
            id="full",
            marks=pytest.mark.skipif(
                not FULL.exists(), reason="the full record is not beside this checkout"
            ),
        ),
    ],
)


def lines(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


@each_record
def test_formulas_reproduce_every_recorded_line(path: Path) -> None:
    for line in lines(path):
        inputs = LegacyInputs(**line["config"])

        assert max_buckets(inputs, line["variant"]) == line["max_buckets"], line
        assert legacy_sizes(inputs, line["variant"]) == line["sizes"], line


def test_streams_of_a_domain_depend_on_its_mode_and_its_ranks() -> None:
    for ranks in (1, 2, 3, 8, 16, 64):
        assert streams_per_domain("AIV", ranks) == 1
        assert streams_per_domain("FFTS", ranks) == 2
    aicpu = [streams_per_domain("AICPU", ranks) for ranks in (1, 2, 3, 8, 16, 17, 64)]
    assert aicpu == [1, 1, 2, 7, 15, 15, 15]
    assert [streams_per_graph(mode) for mode in ("AIV", "FFTS", "AICPU")] == [1, 2, 2]


def test_the_configured_expansion_mode_prices_the_workload() -> None:
    facts = read_model_facts(ROOT / "models" / "tiny-qwen3")
    config = make_config({"model": "m", "device": {"hccl_expansion": "AIV"}})

    assert Workload.from_config(config, facts).expansion == "AIV"
    assert Workload.from_config(make_config({"model": "m"}), facts).expansion == "FFTS"


def test_published_values_of_a_61_layer_model() -> None:
    moe = {"num_hidden_layers": 61, "moe": True}

    assert max_buckets(LegacyInputs(**moe, tp=16), "last") == 9
    assert max_buckets(LegacyInputs(**moe, tp=16, aiv=True), "last") == 14
    assert max_buckets(LegacyInputs(**moe, tp=8, dp=2, ep=True, aiv=True), "last") == 5
    assert legacy_sizes(LegacyInputs(**moe, tp=8, dp=2), "last") == [1, 80, 184, 320, 512]


def test_a_model_too_deep_for_any_bucket_keeps_the_largest_size() -> None:
    deep = LegacyInputs(num_hidden_layers=4000, sizes=(1, 8, 64))

    assert max_buckets(deep, "v0.11") < 1
    assert {tuple(legacy_sizes(deep, v)) for v in ("v0.11", "v0.13", "v0.20", "last")} == {(64,)}


@given(st.sets(st.integers(1, 2000), min_size=1, max_size=60), st.integers(-2, 70))
def test_trimming_keeps_order_both_ends_and_the_limit(sizes: set[int], limit: int) -> None:
    ascending = sorted(sizes)

    kept = trim_sizes(ascending, limit)

    assert kept == sorted(set(kept)) and set(kept) <= sizes
    assert kept[-1] == ascending[-1]
    assert len(kept) == min(len(ascending), max(limit, 1))
    assert limit <= 1 or kept[0] == ascending[0]


@pytest.mark.parametrize(("expansion", "streams"), [("AIV", 24), ("AICPU", 24), ("FFTS", 40)])
def test_streams_of_links_over_hixl_are_kept_from_graphs(expansion: str, streams: int) -> None:
    kv = {"transport": "hixl", "closed_network": True, "host_gib": 1.0}
    graph, device = {"reserve_streams": 5}, {"hccl_expansion": expansion}
    raw: dict[str, Any] = {"model": "m", "kv": kv, "graph": graph, "device": device}
    assert reserved_streams(make_config(raw)) == 5, "without prefill groups, nothing is fetched"
    raw["parallel"] = {"dp": 2, "prefill_groups": 1}
    assert reserved_streams(make_config(raw)) == 5 + streams
    raw["kv"] = {"host_gib": 1.0}
    assert reserved_streams(make_config(raw)) == 5


@each_record
def test_piecewise_models_equal_their_formula_on_a_device_of_2048_streams(path: Path) -> None:
    names = {"v0.11": "legacy-0.11", "v0.13": "legacy-0.13", "v0.20": "legacy-0.20"}
    offer = StreamOffer(rank=0, available=2048, reserve=32)

    for line in lines(path):
        c = line["config"]
        model = partial(make_budget_model, names.get(line["variant"], "legacy-last"))
        workload = Workload(
            num_layers=c["num_hidden_layers"],
            mode=c["cudagraph_mode"],
            moe=c["moe"],
            tp=c["tp"],
            dp=c["dp"],
            pcp=c["pcp"],
            dcp=c["dcp"],
            ep=16 if c["ep"] else 1,
            expansion="AIV" if c["aiv"] else "AICPU",
            multistream_shared=c["multistream_shared"],
            draft_layers=c["draft_layers"],
        )
        num_sizes = len(LegacyInputs(**c).candidate_sizes)
        families = [decode_family(num_sizes), piecewise_family(num_sizes)]

        assert most(model, families, workload, offer) == max(0, line["max_buckets"]), line


workloads = st.builds(
    Workload,
    num_layers=st.integers(1, 100),
    mode=st.sampled_from(["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    moe=st.booleans(),
    tp=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([1, 4]),
    pcp=st.sampled_from([1, 2]),
    expansion=st.sampled_from(["AIV", "AICPU"]),
    draft_layers=st.integers(0, 2),
)
models = st.sampled_from(["legacy-0.11", "legacy-0.13", "legacy-0.20", "legacy-last"]).map(
    lambda name: partial(make_budget_model, name)
)
offers = st.builds(
    StreamOffer, rank=st.just(0), available=st.integers(0, 4000), reserve=st.integers(0, 300)
)


def priced_family(workload: Workload) -> GraphFamily:
    return decode_family() if workload.mode == "FULL_DECODE_ONLY" else piecewise_family()


@given(models, workloads, offers)
def test_the_buckets_a_formula_allows_are_paid_for(model, workload, offer) -> None:
    family = priced_family(workload)

    limit = most(model, [family], workload, offer)

    fixed = total(model(workload).fixed(offer))
    assert limit == 0 or limit * total(model(workload).price(family, offer)) + fixed <= 1800
    assert limit <= offer.usable


def test_a_driver_that_takes_few_sizes_caps_piecewise_buckets_only() -> None:
    offer = StreamOffer(rank=0, available=2048, max_sizes=max_piecewise_sizes("Ascend950PR"))
    workload = Workload(num_layers=4, mode="FULL_AND_PIECEWISE")
    model = partial(make_budget_model, "legacy-last")

    limits = model(workload).limits([decode_family(), piecewise_family()], offer)

    assert all(limit.admits((7, 4)) for limit in limits)
    assert not all(limit.admits((0, 5)) for limit in limits)
    assert max_piecewise_sizes("Ascend910B1") is None


@given(st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=9), st.integers(0, 2048))
def test_ranks_of_one_card_share_its_streams(cards, available) -> None:
    offers = [
        StreamOffer(rank=rank, available=available, card=card) for rank, card in enumerate(cards)
    ]

    shared = share_cards(offers)

    for card in ("a", "b"):
        assert sum(o.available for o in shared if o.card == card) <= available
    assert all(o.available == available for o in shared if cards.count(o.card) == 1 or not o.card)
