"""In strict mode, no architecture violates a rule of any chip or of any release series of CANN.

Each architecture uses all features that it supports: full and piecewise graphs, experts on other
    ranks, and a draft.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import laws
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS, Reference
from tests.parity.rounding import assert_best_but_for_rounding
from tests.slow import slow

CHIPS = [("Ascend910B1", "8.5.0"), ("Ascend910B1", "9.1.0"), ("Ascend910_9391", "9.1.0")]
DENSE = {"parallel": {"tp": 2}, "graph": {"sizes": (1, 4, 12), "mixed_sizes": (16, 64)}}
SPREAD = {**DENSE, "parallel": {"dp": 2, "ep": 2}}
DRAFTED = {
    **SPREAD,
    "graph": {"sizes": (2, 8, 24), "mixed_sizes": (16, 64)},
    "speculative": {"num_tokens": 1},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": DENSE,
    "Qwen2ForCausalLM": DENSE,
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": SPREAD,
    "DeepseekV2ForCausalLM": SPREAD,
    "DeepseekV3ForCausalLM": DRAFTED,
}


SMALL_HEADS = ("LlamaForCausalLM", "Qwen2ForCausalLM")  # CANN 8.5 refuses their head size, 32
ALL = [
    (architecture, *chip)
    for architecture in ARCHITECTURES
    for chip in CHIPS
    if not (architecture in SMALL_HEADS and chip[1].startswith("8."))
]
A2_OLD, A2, A3 = CHIPS
# Each architecture occurs once. Each chip occurs twice: with experts and without. The profile
# "full" tries all combinations.
FEW = [
    slow("Qwen3ForCausalLM", *A2_OLD),
    ("Qwen3MoeForCausalLM", *A3),
    slow("LlamaForCausalLM", *A2),
    slow("Qwen2ForCausalLM", *A3),
    slow("DeepseekV2ForCausalLM", *A2),
    slow("DeepseekV3ForCausalLM", *A2_OLD),
]


# Ways in which ranks share contexts: sharded caches, split prompts, and both. CANN 8.5.0 supports
# none of these ways.
SHARED: dict[str, dict[str, Any]] = {
    "keys": {**DENSE, "parallel": {"tp": 4, "dcp": 2}},
    "prompts": {**DENSE, "parallel": {"pcp": 2}},
    "latents": {**DRAFTED, "parallel": {"tp": 2, "pcp": 2, "dcp": 4, "cp_interleave": 16}},
}
SUMS = ("latents", "Ascend910_9391", "8.5.1")  # first CANN that returns log-sum-exps for latents
ALL_SHARED = [SUMS, *((which, *chip) for which in SHARED for chip in CHIPS[1:])]
FEW_SHARED = [slow("keys", *A3), slow("prompts", *A2), slow("latents", *A3), slow(*SUMS)]


@pytest.mark.parametrize(("architecture", "soc", "cann"), ALL if laws.is_full() else FEW)
def test_tokens_are_the_best_but_for_rounding_on_every_chip(
    references: Any, architecture: str, soc: str, cann: str
) -> None:
    check(references(architecture), ARCHITECTURES[architecture], soc, cann)


@pytest.mark.parametrize(("which", "soc", "cann"), ALL_SHARED if laws.is_full() else FEW_SHARED)
def test_tokens_of_shared_contexts_are_the_best_but_for_rounding(
    references: Any, which: str, soc: str, cann: str
) -> None:
    architecture = "DeepseekV3ForCausalLM" if which == "latents" else "Qwen3ForCausalLM"
    check(references(architecture), SHARED[which], soc, cann)


def check(reference: Reference, sections: dict[str, Any], soc: str, cann: str) -> None:
    config = make_deployment_config(
        reference.directory,
        dtype="bfloat16",
        device={"emulator": {"strict": True, "soc": soc, "cann": cann}},
        **{**sections, "graph": {"mode": "FULL_AND_PIECEWISE", **sections["graph"]}},
    )

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        buckets = group.report()["buckets"]

    assert_best_but_for_rounding(reference, [answer.tokens for answer in answers])
    assert any(bucket["replays"] for bucket in buckets)
