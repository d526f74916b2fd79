"""A request with a token whose embedding is NaN fails, and all other requests get the correct
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actors.serving_ranks import ServingRanks, serving_ranks
from tests.checkpoints import VOCAB, add_next_token_module, copy_of, make_prompts
from tests.deployments import greedy_params, make_deployment_config, tokens_of
from tests.slow import slow

LENGTHS, TOKENS, ANSWER_S, BAD = (20, 33, 60, 90), 12, 120.0, VOCAB - 1


@pytest.fixture(params=[0, slow(2)])
def damaged(request: Any, checkpoint: Path, tmp_path: Path) -> tuple[Path, int]:
    """Return a checkpoint whose embedding has one row of NaN, and the number of draft tokens to
    use.
    """
    directory = copy_of(checkpoint, tmp_path)
    if request.param:
        add_next_token_module(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(tensors, file)
    return directory, request.param


@pytest.mark.parametrize("updates", ["sent", slow("none")])  # with drafts, both are "sent"
def test_nan_ends_its_own_request_and_leaves_no_trace_in_blocks_or_prefix_cache(
    damaged: tuple[Path, int], updates: str, tmp_path: Path
) -> None:
    directory, num_drafts = damaged
    prompts = [[token % BAD for token in prompt] for prompt in make_prompts(LENGTHS)]
    bad = [[*prompt[:18], BAD, *prompt[18:]] for prompt in prompts]
    config = make_deployment_config(
        directory,
        parallel={"tp": 2},
        # Prompts are split, so that some blocks are full before logits are computed. The cache has
        # few blocks, so that requests soon get blocks of failed requests.
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 32},
        kv={"num_blocks": 14, "block_size": 32},
        graph={"updates": updates},
        speculative={"num_tokens": num_drafts},
    )

    def ask(service: ServingRanks, name: str, prompts: list[list[int]]) -> list[Any]:
        params = greedy_params(TOKENS)
        return [service.submit(f"{name}{i}", p, params) for i, p in enumerate(prompts)]

    with serving_ranks(config, tmp_path) as service:
        wanted = tokens_of(ANSWER_S, ask(service, "before", prompts))
        for turn in ("first", "second"):
            beside = ask(service, f"beside-{turn}", prompts)
            failing = ask(service, f"bad-{turn}", bad)
            assert tokens_of(ANSWER_S, beside) == wanted
            for answer in failing:
                assert answer.ended.wait(ANSWER_S)
                assert (answer.tokens, answer.error_kind) == ([], "NonFiniteLogitsError")
        assert tokens_of(ANSWER_S, ask(service, "after", prompts)) == wanted
        metrics = service.loop.metrics()

    assert metrics["non_finite_requests"] == 2 * len(bad)
    assert metrics["kv_cache_usage"] == 0
