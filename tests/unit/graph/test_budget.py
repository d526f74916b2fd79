"""The historical formulas line by line, and the models built on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import make_config
from dist_aclgraph.graph.budget import (
    LegacyInputs,
    StreamOffer,
    Workload,
    legacy_sizes,
    make_budget_model,
    max_buckets,
    streams_per_domain,
    trim_sizes,
)
from dist_aclgraph.model_facts import read_model_facts

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests" / "data" / "stream_budget_sample.jsonl"
FULL = ROOT.parent / "shared" / "oracles" / "stream_budget.jsonl"


def lines(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


@pytest.mark.parametrize("path", [SAMPLE, FULL], ids=["sample", "full"])
def test_formulas_reproduce_every_recorded_line(path: Path) -> None:
    if not path.exists():
        pytest.skip("the full record is not beside this checkout")

    for line in lines(path):
        inputs = LegacyInputs(**line["config"])

        assert max_buckets(inputs, line["variant"]) == line["max_buckets"], line
        assert legacy_sizes(inputs, line["variant"]) == line["sizes"], line


def test_what_a_communication_domain_costs() -> None:
    for ranks in (1, 2, 3, 8, 16, 64):
        assert streams_per_domain("AIV", ranks) == 1
        assert streams_per_domain("FFTS", ranks) == 2
    aicpu = [streams_per_domain("AICPU", ranks) for ranks in (1, 2, 3, 8, 16, 17, 64)]
    assert aicpu == [1, 1, 2, 7, 15, 15, 15]


def test_the_configured_expansion_mode_prices_the_workload() -> None:
    facts = read_model_facts(ROOT / "models" / "tiny-qwen3")
    config = make_config({"model": "m", "device": {"hccl_expansion": "AIV"}})

    assert Workload.from_config(config, facts).aiv
    assert not Workload.from_config(make_config({"model": "m"}), facts).aiv


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


def test_piecewise_models_equal_their_formula_on_a_device_of_2048_streams() -> None:
    names = {"v0.11": "legacy-0.11", "v0.13": "legacy-0.13", "v0.20": "legacy-0.20"}
    offer = StreamOffer(rank=0, available=2048, reserve=32)

    for line in lines(SAMPLE):
        c = line["config"]
        model = make_budget_model(names.get(line["variant"], "legacy-last"))
        workload = Workload(
            num_layers=c["num_hidden_layers"],
            mode=c["cudagraph_mode"],
            moe=c["moe"],
            tp=c["tp"],
            dp=c["dp"],
            pcp=c["pcp"],
            dcp=c["dcp"],
            ep=16 if c["ep"] else 1,
            aiv=c["aiv"],
            multistream_shared=c["multistream_shared"],
            draft_layers=c["draft_layers"],
            num_candidates=len(LegacyInputs(**c).candidate_sizes),
        )

        assert model.max_buckets(offer, workload) == line["max_buckets"], line


workloads = st.builds(
    Workload,
    num_layers=st.integers(1, 100),
    mode=st.sampled_from(["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    moe=st.booleans(),
    tp=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([1, 4]),
    pcp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 8]),
    aiv=st.booleans(),
    draft_layers=st.integers(0, 2),
    num_candidates=st.integers(0, 50),
)
models = st.sampled_from(["legacy-0.11", "legacy-0.13", "legacy-0.20", "legacy-last"]).map(
    make_budget_model
)


@given(models, workloads, st.integers(0, 4000), st.integers(0, 300))
def test_the_buckets_a_model_allows_are_paid_for(model, workload, available, reserve) -> None:
    offer = StreamOffer(rank=0, available=available, reserve=reserve)

    limit = model.max_buckets(offer, workload)

    assert limit >= 0
    spent = limit * model.price(1, workload) + model.fixed_price(workload)
    assert limit == 0 or spent <= 1800
    assert limit <= offer.usable


@given(models, workloads)
def test_the_explanation_adds_up_to_the_price(model, workload) -> None:
    terms = model.explain(workload)

    total = sum(term.total for term in terms)

    assert total == model.price(1, workload) + model.fixed_price(workload)


def test_a_driver_that_takes_few_sizes_caps_the_buckets() -> None:
    offer = StreamOffer(rank=0, available=2048, max_sizes=4)

    assert make_budget_model("legacy-last").max_buckets(offer, Workload(num_layers=4)) == 4
