"""In each tested parallel layout, models with experts give the same tokens as transformers.

Layouts differ along several axes. Not every combination is tried, but for any two axes, each pair
of values occurs in some layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from dist_aclgraph.config import Config
from tests.deployments import deployed, greedy_params, make_deployment_config, serving
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS, Reference
from tests.parity.rounding import assert_best_but_for_rounding
from tests.slow import spread


class Layout(NamedTuple):
    """A deployment: its ranks, exchange, graph mode, number of drafts, and the number of copies of
    its 8 experts.
    """

    architecture: str
    tp: int
    dp: int
    ep: int
    exchange: str
    mode: str
    drafts: int
    copies: int = 0


V3, V2, QWEN = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM"
EAGER, DECODE, BOTH = "NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
LAYOUTS = [
    Layout(V3, 1, 1, 1, "auto", EAGER, 1),
    Layout(V3, 2, 1, 1, "auto", DECODE, 3),
    Layout(V3, 4, 1, 1, "auto", BOTH, 1),
    Layout(V3, 4, 1, 4, "all_gather", DECODE, 2),
    Layout(V3, 2, 1, 2, "all_to_all", EAGER, 2),
    Layout(V3, 1, 2, 2, "all_gather", EAGER, 3),
    Layout(V3, 2, 2, 4, "all_to_all", BOTH, 3),
    Layout(V3, 2, 2, 4, "all_gather", BOTH, 0),
    Layout(V3, 2, 2, 4, "all_gather", DECODE, 1),
    Layout(V2, 1, 2, 2, "all_to_all", DECODE, 0),
    Layout(V2, 2, 2, 4, "all_gather", BOTH, 0),
    Layout(V2, 4, 1, 4, "all_to_all", EAGER, 0),
    Layout(QWEN, 1, 2, 2, "all_gather", BOTH, 0),
    Layout(QWEN, 2, 2, 4, "all_to_all", EAGER, 0),
    Layout(QWEN, 4, 1, 4, "all_gather", DECODE, 0),
    Layout(QWEN, 1, 3, 3, "all_gather", BOTH, 0, 1),
    Layout(V3, 1, 3, 3, "all_to_all", DECODE, 1, 4),
    Layout(V3, 2, 1, 2, "all_gather", DECODE, 1, 2),
    Layout(V2, 1, 6, 6, "all_gather", EAGER, 0, 4),
]
# Two independent groups that serve together as one deployment.
INDEPENDENT = Layout(V3, 1, 2, 1, "auto", BOTH, 2)
# These layouts use types of 16 bits, because the documents of MC2's operators allow no other types.
MC2_LAYOUTS = [
    Layout(V3, 1, 2, 2, "mc2", DECODE, 1),
    Layout(V3, 2, 2, 4, "mc2", BOTH, 2),
    Layout(V2, 4, 1, 4, "mc2", EAGER, 0),
    Layout(QWEN, 1, 2, 2, "mc2", BOTH, 0),
    Layout(V2, 1, 3, 3, "mc2", DECODE, 0, 4),
]


def sizes(layout: Layout) -> dict[str, Any]:
    """Return the graph sizes for the layout's graph mode. The size of a decode batch includes its
    drafts.
    """
    decode = {"sizes": tuple(count * (layout.drafts + 1) for count in (1, 4, 12))}
    return {EAGER: {}, DECODE: decode, BOTH: {**decode, "mixed_sizes": (16, 64)}}[layout.mode]


def make_config(reference: Reference, layout: Layout, dtype: str) -> Config:
    return make_deployment_config(
        reference.directory,
        dtype=dtype,
        parallel={
            "tp": layout.tp,
            "dp": layout.dp,
            "ep": layout.ep,
            "exchange": layout.exchange,
            "redundant_experts": layout.copies,
        },
        graph={"mode": layout.mode, **sizes(layout)},
        speculative={"num_tokens": layout.drafts},
    )


def answers_of(reference: Reference, layout: Layout, dtype: str) -> list[list[int]]:
    """Return the greedy answers of one group of all ranks."""
    with lockstep(make_config(reference, layout, dtype)) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        buckets = group.report()["buckets"]
    assert any(bucket["replays"] for bucket in buckets) == (layout.mode != EAGER)
    return [answer.tokens for answer in answers]


# These layouts cover drafts and each exchange. All layouts together would take minutes.
QUICK = (LAYOUTS[8], LAYOUTS[9], MC2_LAYOUTS[0])
# These layouts cover each exchange with each architecture, 1 to 3 drafts with V3, and copies of
# experts.
MORE = [
    *(LAYOUTS[i] for i in (3, 4, 6, 10, 13, 15, 16, 17, 18)),
    *(MC2_LAYOUTS[i] for i in (1, 2, 4)),
]


def name(layout: Layout) -> str:
    return "-".join(map(str, layout))


@pytest.mark.parametrize("layout", spread(LAYOUTS, QUICK, MORE), ids=name)
def test_greedy_tokens_equal_those_of_transformers(references: Any, layout: Layout) -> None:
    reference = references(layout.architecture)

    assert answers_of(reference, layout, "float32") == reference.tokens


@deployed
@pytest.mark.slow
def test_independent_groups_give_the_tokens_of_transformers(references: Any) -> None:
    reference = references(INDEPENDENT.architecture)

    with serving(make_config(reference, INDEPENDENT, "float32")) as service:
        answers = service.generate(reference.prompts, greedy_params(NUM_TOKENS))
        report = service.report()

    assert [answer.tokens for answer in answers] == reference.tokens
    # On a busy machine, one group may answer all requests before the client has connected to the
    # other group.
    groups = [report, *report["groups"]]
    assert sum(bucket["replays"] for group in groups for bucket in group["buckets"]) > 0


@pytest.mark.parametrize("layout", spread(MC2_LAYOUTS, QUICK, MORE), ids=name)
def test_mc2_chooses_tokens_that_are_best_but_for_rounding(references: Any, layout: Layout) -> None:
    reference = references(layout.architecture)
    answers = answers_of(reference, layout, "bfloat16")

    assert_best_but_for_rounding(reference, answers)
