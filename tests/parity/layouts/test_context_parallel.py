"""With layouts in which ranks share the contexts of requests, tokens equal those of transformers.

Layouts differ along several axes. For any two axes, each pair of values occurs in some layout.
``make test`` tries two layouts with shards and split prompts: one model with keys, and one model
with latents, drafts and experts. The full profile tries every graph mode with every number of
drafts, for shards and for split prompts.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest

from dist_aclgraph.config import Config
from tests.deployments import greedy_params, make_deployment_config
from tests.laws import is_full
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS, Reference
from tests.slow import spread

BLOCK_SIZE = 128
V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
QWEN, LLAMA, QWEN_MOE = "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"
EAGER, PIECES, DECODE = "NONE", "PIECEWISE", "FULL_DECODE_ONLY"
BOTH, FULL = "FULL_AND_PIECEWISE", "FULL"


class Layout(NamedTuple):
    """The layout of a deployment: its ranks, shards, experts, number of drafts, and graph mode."""

    architecture: str
    tp: int
    pcp: int
    dcp: int
    dp: int = 1
    ep: int = 1
    exchange: str = "auto"
    drafts: int = 0
    interleave: int = 1
    mode: str = DECODE


LAYOUTS = [
    # Both models have 4 query heads. One has 2 key heads, the other has latents.
    Layout(QWEN, 4, 1, 2),
    Layout(QWEN, 1, 2, 1, mode=EAGER),
    Layout(QWEN, 2, 2, 2, interleave=16, mode=BOTH),
    Layout(LLAMA, 4, 1, 2, interleave=BLOCK_SIZE, mode=FULL),
    Layout(LLAMA, 1, 4, 4, mode=PIECES),
    Layout(QWEN_MOE, 4, 2, 4, ep=8, exchange="all_gather", interleave=16),
    Layout(QWEN_MOE, 2, 2, 1, dp=2, ep=8, exchange="all_to_all", mode=BOTH),
    Layout(V2, 2, 1, 2, dp=2, ep=4, exchange="all_to_all", mode=PIECES),
    Layout(V2, 4, 1, 4, interleave=BLOCK_SIZE, mode=EAGER),
    Layout(V2, 2, 4, 8, ep=8, exchange="all_gather", interleave=16, mode=BOTH),
    Layout(V3, 2, 1, 2, drafts=1),
    Layout(V3, 4, 1, 4, ep=4, exchange="all_gather", drafts=3, interleave=16, mode=BOTH),
    Layout(V3, 1, 2, 1, dp=2, ep=4, exchange="all_to_all", drafts=2, mode=DECODE),
    Layout(V3, 1, 2, 2, drafts=2, interleave=BLOCK_SIZE, mode=EAGER),
    Layout(V3, 2, 2, 4, dp=2, ep=8, exchange="all_gather", drafts=1, mode=BOTH),
    Layout(V3, 2, 2, 2, drafts=3, interleave=16, mode=PIECES),
    Layout(V3, 1, 2, 2, dp=2, ep=4, exchange="all_gather", drafts=1, mode=BOTH),
]
PAIRS = [
    Layout(V3, *ranks, drafts=drafts, mode=mode)
    for ranks, mode, drafts in product(
        [(2, 1, 2), (1, 2, 1), (1, 2, 2)], [EAGER, PIECES, DECODE, BOTH], [1, 2, 3]
    )
]


def name(layout: Layout) -> str:
    return "-".join(map(str, layout))


def sizes(layout: Layout) -> dict[str, Any]:
    """Return the graph sizes for the layout's graph mode. The size of a decode batch includes its
    drafts.
    """
    decode = {"sizes": tuple(count * (layout.drafts + 1) for count in (1, 4, 12))}
    mixed = (16, 64, 256)
    return {
        EAGER: {},
        PIECES: {"sizes": mixed},
        DECODE: decode,
        BOTH: {**decode, "mixed_sizes": mixed},
        FULL: {},
    }[layout.mode]


def make_config(reference: Reference, layout: Layout, **more: Any) -> Config:
    return make_deployment_config(
        reference.directory,
        parallel={
            "tp": layout.tp,
            "pcp": layout.pcp,
            "dcp": layout.dcp,
            "cp_interleave": layout.interleave,
            "dp": layout.dp,
            "ep": layout.ep,
            "exchange": layout.exchange,
        },
        graph={"mode": layout.mode, **sizes(layout)},
        speculative={"num_tokens": layout.drafts},
        kv={"block_size": BLOCK_SIZE},
        **more,
    )


def check(reference: Reference, layout: Layout) -> None:
    with lockstep(make_config(reference, layout)) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        buckets = group.report()["buckets"]
        pools = [rank.pool for rank in group.scheduler.ranks]
    assert any(bucket["replays"] for bucket in buckets) == (layout.mode != EAGER)
    assert all(pool.num_used == 0 for pool in pools)
    assert [answer.tokens for answer in answers] == reference.tokens


QUICK = (LAYOUTS[16],)  # a layout with four ranks; one with eight ranks takes twice as long
# These layouts cover every architecture, exchange, graph mode and number of drafts, and a
# deployment of eight ranks.
MORE = [LAYOUTS[i] for i in (0, 2, 3, 4, 6, 9, 11, 13, 15)]


@pytest.mark.parametrize("layout", spread(LAYOUTS, QUICK, MORE), ids=name)
def test_greedy_tokens_equal_those_of_transformers(long_references: Any, layout: Layout) -> None:
    check(long_references(layout.architecture), layout)


@pytest.mark.slow
def test_a_rank_in_the_middle_of_a_prompt_drafts_beside_one_that_samples(
    long_references: Any,
) -> None:
    reference = long_references(V3)
    layout = Layout(V3, 1, 2, 2, dp=2, ep=4, exchange="all_gather", drafts=2)
    longest, short = len(reference.prompts) - 1, 3
    with lockstep(make_config(reference, layout)) as group:
        prompts = [reference.prompts[longest], reference.prompts[short]]
        answers = group.generate(prompts, greedy_params(NUM_TOKENS))

    assert [a.tokens for a in answers] == [reference.tokens[longest], reference.tokens[short]]


@pytest.mark.slow
def test_domains_are_there_before_anything_is_counted(long_references: Any) -> None:
    reference = long_references(QWEN)
    with lockstep(make_config(reference, Layout(QWEN, 4, 2, 4, mode=PIECES))) as group:
        before = [offer.available for offer in group.ranks.call("offer", "SERVING", 60.0)]
        group.generate(reference.prompts[-3:], greedy_params(2))
        after = [offer.available for offer in group.ranks.call("offer", "SERVING", 60.0)]

    assert before == after


@pytest.mark.skipif(not is_full(), reason="with the full profile")
@pytest.mark.parametrize("layout", PAIRS, ids=name)
def test_every_mode_goes_with_any_number_of_drafts(long_references: Any, layout: Layout) -> None:
    check(long_references(layout.architecture), layout)
