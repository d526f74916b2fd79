"""Graphs with fixed KV lengths give the same tokens as transformers."""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.planning.planner import Planner
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS
from tests.parity.rounding import assert_best_but_for_rounding
from tests.slow import slow

NO_UPDATES = {"mode": "FULL_DECODE_ONLY", "updates": "none"}
STRICT = {"dtype": "bfloat16", "device": {"emulator": {"strict": True}}}


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("Qwen3ForCausalLM", {"tp": 2}),
        slow("LlamaForCausalLM", {}),
        slow("Qwen3NextForCausalLM", {}),
        slow("Qwen3MoeForCausalLM", {"dp": 2, "ep": 2}),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(
    long_references: Any, architecture: str, parallel: dict[str, int]
) -> None:
    """Some requests grow beyond the smallest KV length of graphs, 512 tokens, while other requests
    are short.
    """
    reference = long_references(architecture)
    config = make_deployment_config(reference.directory, parallel=parallel, graph=NO_UPDATES)

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        report = group.report()

    assert [answer.tokens for answer in answers] == reference.tokens
    assert sum(bucket["replays"] for bucket in report["buckets"]) >= NUM_TOKENS - 1
    assert Planner.from_config(config).config.graph.updates == "none"


def test_devices_accept_the_calls(long_references: Any) -> None:
    """In strict mode, the emulator refuses calls that a device refuses."""
    reference = long_references("Qwen3ForCausalLM")
    config = make_deployment_config(reference.directory, graph=NO_UPDATES, **STRICT)

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(16))

    assert_best_but_for_rounding(reference, [answer.tokens for answer in answers])
