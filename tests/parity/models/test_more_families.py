"""Further model families answer with the same tokens and log-probabilities as transformers.

transformers runs one pass over the prompt and the answer. In this pass, each token of the answer
must be the most probable one at its position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.arrays.ints import unpack_ints
from tests.checkpoints import (
    FAMILIES,
    add_next_token_module,
    logprobs,
    make_prompts,
    make_reference,
)
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import Reference
from tests.parity.test_against_transformers import assert_logprobs_near
from tests.slow import rare, slow, spread

LENGTHS, NUM_TOKENS = (1, 3, 23, 64, 129, 300), 12
GRAPHS, EAGER = (1, "FULL_DECODE_ONLY"), (2, "NONE")
OTHERS = [(2, "FULL_AND_PIECEWISE"), (1, "NONE")]
QUICK = [("Gemma3ForCausalLM", *GRAPHS), ("GraniteMoeSharedForCausalLM", *EAGER)]
COVERING = [(name, *each) for name in FAMILIES for each in (GRAPHS, EAGER)]
ALL = [*COVERING, *((name, *each) for name in FAMILIES for each in OTHERS)]


def answers_of(
    directory: Path, prompts: list[list[int]], mode: str, num_drafts: int = 0, **parallel: int
) -> list[Answer]:
    """Return greedy answers with the log-probabilities of three tokens at each position."""
    config = make_deployment_config(
        directory,
        parallel=parallel,
        graph={"mode": mode, "max_tokens": 8},
        kv={"block_size": 16, "num_blocks": 80},
        scheduler={"max_num_batched_tokens": 128},
        speculative={"num_tokens": num_drafts},
    )
    with lockstep(config) as group:
        return group.generate(prompts, greedy_params(NUM_TOKENS, logprobs=3))


def assert_greedy(model: Any, prompts: list[list[int]], answers: list[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = logprobs(model, prompt, answer.tokens)
        assert answer.tokens == expected.argmax(-1).tolist()
        for row, found in zip(expected, answer.logprobs, strict=True):
            ids = unpack_ints(found.token_ids).tolist()
            torch.testing.assert_close(row[ids], torch.tensor(found.logprobs), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "case", spread(ALL, QUICK, COVERING), ids=lambda case: "-".join(map(str, case))
)
def test_tokens_equal_those_of_transformers(
    npu: Any, tmp_path: Path, case: tuple[str, int, str]
) -> None:
    architecture, tp, mode = case
    model, prompts = make_reference(architecture, tmp_path), make_prompts(LENGTHS)

    assert_greedy(model, prompts, answers_of(tmp_path, prompts, mode, tp=tp))


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        slow("GraniteMoeSharedForCausalLM", {"dp": 2, "ep": 2}),
        slow("HunYuanMoEV1ForCausalLM", {"tp": 2, "ep": 2}),
        slow("Ministral3ForCausalLM", {"tp": 4, "dcp": 2}),
        rare("OlmoeForCausalLM", {"dp": 2, "ep": 2}),
        rare("GraniteForCausalLM", {"tp": 4, "dcp": 2}),
        rare("SmolLM3ForCausalLM", {"tp": 2, "dcp": 2, "pcp": 2}),
    ],
)
def test_layouts_change_no_token(
    npu: Any, tmp_path: Path, architecture: str, parallel: dict[str, int]
) -> None:
    model, prompts = make_reference(architecture, tmp_path), make_prompts(LENGTHS)

    assert_greedy(model, prompts, answers_of(tmp_path, prompts, "FULL_DECODE_ONLY", **parallel))


@pytest.mark.parametrize(
    ("num_drafts", "parallel"),
    [slow(0, {"tp": 2, "dcp": 2}), slow(2, {"tp": 2}), rare(0, {"tp": 2, "ep": 2})],
)
def test_heads_of_zeros_change_no_token(
    npu: Any, tmp_path: Path, num_drafts: int, parallel: dict[str, int]
) -> None:
    """Each rank has 3 heads of latent attention. The operator runs with 4 heads, of which one is
    zero.
    """
    model, prompts = make_reference("Glm4MoeLiteForCausalLM", tmp_path), make_prompts(LENGTHS)
    add_next_token_module(tmp_path)

    answers = answers_of(tmp_path, prompts, "FULL_DECODE_ONLY", num_drafts, **parallel)

    assert_greedy(model, prompts, answers)


@pytest.mark.parametrize(
    "architecture",
    [
        slow("Gemma3ForCausalLM"),
        slow("Cohere2ForCausalLM"),
        slow("Ministral3ForCausalLM"),
        slow("Glm4MoeLiteForCausalLM"),
    ],
)
def test_strict_bfloat16_logprobs_lie_near_those_of_transformers(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model, prompts = make_reference(architecture, tmp_path), make_prompts(LENGTHS)
    config = make_deployment_config(
        tmp_path,
        dtype="bfloat16",
        graph={"mode": "FULL_DECODE_ONLY", "max_tokens": 8},
        device={"emulator": {"strict": True}},
    )

    with lockstep(config) as group:
        first = group.generate(prompts, greedy_params(1, logprobs=20))
        group.generate(prompts, greedy_params(NUM_TOKENS), "more")

    reference = Reference(tmp_path, model, prompts, [])
    assert_logprobs_near(reference, [answer.logprobs[0] for answer in first])
