"""Embeddings equal the last hidden states of transformers. Prompts run in chunks, with other
requests, and more than once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import Lockstep, lockstep
from tests.parity.conftest import Reference
from tests.slow import slow

NUM_TOKENS = 4


def assert_equal(reference: Reference, index: int, answer: Answer) -> None:
    prompt = torch.tensor([reference.prompts[index]])
    with torch.no_grad():
        exact = reference.model.model(prompt).last_hidden_state[0, -1].numpy()
    found = np.frombuffer(answer.embedding, "<f4")
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() < 1e-4
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 1)


def answers(group: Lockstep, reference: Reference, name: str) -> list[Answer]:
    """Request the embedding of every prompt, and generated text for every third prompt."""
    params = greedy_params(1, returns_embedding=True)
    asked = []
    for i, prompt in enumerate(reference.prompts):
        asked.append(group.submit(f"{name}{i}", prompt, params))
        if not i % 3:
            text = group.submit(f"{name}{i} text", prompt, greedy_params(NUM_TOKENS))
            asked.append(text)
    group.finish()
    return asked


@pytest.mark.parametrize(
    ("architecture", "mode", "layout"),
    [
        ("Qwen3ForCausalLM", "FULL_AND_PIECEWISE", {"tp": 2}),
        slow("Qwen3ForCausalLM", "FULL", {"tp": 1}),
        slow("Qwen3ForCausalLM", "FULL_DECODE_ONLY", {"tp": 1, "pcp": 2, "dcp": 2}),
        slow("DeepseekV3ForCausalLM", "FULL_DECODE_ONLY", {"tp": 2, "dcp": 2}),
    ],
)
def test_embeddings_equal_the_last_hidden_states_of_transformers(
    references: Any, architecture: str, mode: str, layout: dict[str, int]
) -> None:
    reference = references(architecture)
    config = make_deployment_config(
        reference.directory,
        graph={"mode": mode},
        parallel=layout,
        kv={"block_size": 16},
        scheduler={"max_num_batched_tokens": 48},
        speculative={"num_tokens": 1 if "Deepseek" in architecture else 0},
    )
    with lockstep(config) as group:
        # In the second run, prefixes are cached; in the third run, requests are preempted.
        for name, num_blocks in [("a", None), ("b", None), ("c", 24)]:
            if num_blocks is not None:
                group.restart(num_blocks=num_blocks)
            found = iter(answers(group, reference, name))
            for i, tokens in enumerate(reference.tokens):
                assert_equal(reference, i, next(found))
                if not i % 3:
                    text = next(found)
                    assert (text.tokens, text.embedding) == (tokens[:NUM_TOKENS], b"")
