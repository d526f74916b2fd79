"""In strict mode, int8 weights on several ranks give the same tokens with graphs and eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_prompts, make_reference
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.slow import slow


def generate(
    directory: Path,
    parallel: dict[str, int],
    mode: str,
    quantization: str | None = "w8a8",
    fusions: str | list[str] = "auto",
) -> list[list[int]]:
    config = make_deployment_config(
        directory,
        dtype="bfloat16",
        quantization=quantization,
        parallel=parallel,
        graph={"mode": mode},
        device={"emulator": {"strict": True}, "fusions": fusions},
    )
    with lockstep(config) as group:
        # The requests run one after another, because the size of a batch can change how float
        # products are rounded.
        answers = [
            group.generate([prompt], greedy_params(8), f"alone{i}")[0]
            for i, prompt in enumerate(make_prompts([5, 150]))
        ]
        report = group.report()
    assert quantization is None or report["fusions"]["norm_quant"].startswith("in ")
    if mode != "NONE":
        assert sum(bucket["replays"] for bucket in report["buckets"]) > 0
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("Qwen3ForCausalLM", {"tp": 2}),
        slow("DeepseekV3ForCausalLM", {"tp": 2, "dp": 2, "ep": 4}),
        slow("DeepseekV3ForCausalLM", {"tp": 2, "pcp": 2, "dcp": 4, "ep": 4}),
    ],
)
def test_graphs_give_the_tokens_of_eager_steps(
    npu: Any, tmp_path: Path, architecture: str, parallel: dict[str, int]
) -> None:
    make_reference(architecture, tmp_path, num_hidden_layers=2)

    eager = generate(tmp_path, parallel, "NONE")

    assert [len(tokens) for tokens in eager] == [8, 8]
    assert generate(tmp_path, parallel, "FULL_DECODE_ONLY") == eager
