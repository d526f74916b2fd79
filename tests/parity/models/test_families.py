"""Model families generate the right tokens with parallel layouts, chunked prompts, drafts, and
other names of weights.

``test_against_transformers.py`` tests each family on one rank and on two ranks, in eager steps and
with graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import (
    add_next_token_module,
    greedy,
    make_prompts,
    make_reference,
)
from tests.deployments import greedy_params, make_deployment_config
from tests.image_checkpoints import make_kimi_k25
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS
from tests.slow import rare, slow

GLM, MINIMAX, GPT_OSS = "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "GptOssForCausalLM"
QWEN_NEXT, QWEN_MOE = "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"
QWEN_DENSE, KIMI_LINEAR = "Qwen3_5ForCausalLM", "KimiLinearForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        slow(GLM, {"tp": 2, "ep": 2}),
        (MINIMAX, {"tp": 4}),  # several ranks have the same KV head; norms span all heads
        (GPT_OSS, {"dp": 2, "ep": 2}),
        slow(GLM, {"dp": 2, "ep": 2}),
        rare(GLM, {"tp": 4}),
        slow(MINIMAX, {"tp": 2, "dp": 2, "ep": 4}),
        rare(GPT_OSS, {"tp": 4}),
        slow(GPT_OSS, {"tp": 2, "ep": 2}),
        slow(QWEN_NEXT, {"tp": 2, "ep": 2}),
        slow(QWEN_MOE, {"dp": 2, "ep": 2}),
        slow(KIMI_LINEAR, {"tp": 2, "ep": 2}),
        rare(KIMI_LINEAR, {"tp": 4}),
        slow(KIMI_LINEAR, {"dp": 2, "ep": 2}),
    ],
)
def test_layouts_change_no_token(
    references: Any, architecture: str, parallel: dict[str, int]
) -> None:
    reference = references(architecture)

    with lockstep(make_deployment_config(reference.directory, parallel=parallel)) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))

    assert [answer.tokens for answer in answers] == reference.tokens


@pytest.mark.parametrize(
    ("architecture", "mode", "tp"),
    [
        slow(GPT_OSS, "FULL_AND_PIECEWISE", 2),
        slow(GLM, "PIECEWISE", 1),
        slow(MINIMAX, "FULL", 2),
        (QWEN_NEXT, "FULL_AND_PIECEWISE", 1),
        slow(KIMI_LINEAR, "FULL_AND_PIECEWISE", 2),
        rare(KIMI_LINEAR, "PIECEWISE", 1),
    ],
)
def test_prompts_in_chunks_change_no_token(
    long_references: Any, architecture: str, mode: str, tp: int
) -> None:
    reference = long_references(architecture)
    config = make_deployment_config(
        reference.directory,
        parallel={"tp": tp},
        graph={"mode": mode, "max_tokens": 48},  # fewer captures take less time
        scheduler={"max_num_batched_tokens": 128},
        kv={"block_size": 32, "num_blocks": 320},
    )

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))

    assert [answer.tokens for answer in answers] == reference.tokens


@pytest.mark.parametrize(
    ("architecture", "num_drafts"), [slow(QWEN_DENSE, 1), rare(QWEN_MOE, 0), rare(QWEN_NEXT, 2)]
)
def test_hybrids_on_four_ranks_continue_from_checkpoints(
    npu: Any, tmp_path: Path, architecture: str, num_drafts: int
) -> None:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    model = make_reference(architecture, tmp_path, **heads)
    add_next_token_module(tmp_path)
    start, tails = make_prompts((64,))[0], make_prompts((1, 9, 20), seed=7)
    prompts = [start + tail for tail in tails]
    config = make_deployment_config(
        tmp_path,
        parallel={"tp": 4},
        graph={"mode": "FULL_DECODE_ONLY", "sizes": (6,)},
        speculative={"num_tokens": num_drafts},
        # The requests share 4 blocks, and each grows to 7 more blocks.
        kv={"block_size": 16, "num_blocks": 11},
    )

    with lockstep(config) as group:
        group.generate([prompts[0]], greedy_params(1), "first")
        answers = group.generate(prompts, greedy_params(20))
        scheduler = group.scheduler

    assert scheduler.num_preemptions
    assert scheduler.num_cached_tokens >= len(prompts) * len(start)
    assert [answer.tokens for answer in answers] == greedy(model, prompts, 20)


@pytest.mark.parametrize(
    ("num_drafts", "parallel"), [slow(1, {"tp": 2}), slow(3, {}), slow(2, {"dp": 2, "ep": 2})]
)
def test_drafts_of_glm_change_no_token(
    references: Any, num_drafts: int, parallel: dict[str, int]
) -> None:
    reference = references(GLM)
    config = make_deployment_config(
        reference.directory, parallel=parallel, speculative={"num_tokens": num_drafts}
    )

    with lockstep(config) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))

    assert [answer.tokens for answer in answers] == reference.tokens


@pytest.mark.parametrize(
    ("architecture", "num_drafts"),
    [
        (QWEN_NEXT, 1),
        slow(QWEN_NEXT, 0),
        slow(QWEN_MOE, 3),
        slow(QWEN_DENSE, 2),
        (KIMI_LINEAR, 0),
    ],
)
def test_graphs_of_hybrids_in_strict_bfloat16_equal_eager_steps(
    npu: Any, tmp_path: Path, architecture: str, num_drafts: int
) -> None:
    """CANN's operators of linear attention need bfloat16. Strict mode refuses calls that CANN's
    documents exclude.
    """
    make_reference(architecture, tmp_path)
    if num_drafts:
        add_next_token_module(tmp_path)
    prompts, found = make_prompts((1, 3, 40, 65)), []
    # Only decode batches have graphs here, because they need no padding. In padded batches, results
    # could be rounded in another way than in eager steps.
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        config = make_deployment_config(
            tmp_path,
            dtype="bfloat16",
            graph={"mode": mode},
            speculative={"num_tokens": num_drafts},
            kv={"block_size": 32},
            device={"emulator": {"strict": True}},
        )
        with lockstep(config) as group:
            answers = [group.generate(prompts, greedy_params(12), name) for name in "ab"]
        found.append([answer.tokens for each in answers for answer in each])

    assert found[0] == found[1]


@pytest.mark.parametrize("tp", [slow(2), slow(1)])
def test_the_text_part_of_kimi_k2_5_is_served_as_published(
    npu: Any, tmp_path: Path, tp: int
) -> None:
    model, prompts = make_kimi_k25(tmp_path), make_prompts((1, 17, 60))

    with lockstep(make_deployment_config(tmp_path, parallel={"tp": tp})) as group:
        answers = group.generate(prompts, greedy_params(16))

    assert [answer.tokens for answer in answers] == greedy(model, prompts, 16)


@pytest.mark.slow
def test_kimi_linear_is_served_as_transformers_saves_it(npu: Any, tmp_path: Path) -> None:
    model, prompts = make_reference(KIMI_LINEAR, tmp_path, as_saved=True), make_prompts((1, 17, 60))

    with lockstep(make_deployment_config(tmp_path)) as group:
        answers = group.generate(prompts, greedy_params(16))

    assert [answer.tokens for answer in answers] == greedy(model, prompts, 16)
