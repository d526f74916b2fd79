"""With logit biases, allowed tokens and bad words, generated tokens equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.slow import slow

NUM_TOKENS = 12


def expected(model: Any, prompt: list[int], settings: dict[str, Any]) -> list[int]:
    """Return the tokens that transformers generates with its own logits processors."""
    given: dict[str, Any] = {}
    if biases := settings.get("logit_bias"):
        given["sequence_bias"] = {(token_id,): value for token_id, value in biases.items()}
    if allowed := settings.get("allowed_token_ids"):
        given["prefix_allowed_tokens_fn"] = lambda batch, ids: list(allowed)
    if words := settings.get("bad_word_ids"):
        given["bad_words_ids"] = [list(word) for word in words]
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def settings_for(free: list[int]) -> list[dict[str, Any]]:
    """Return several settings. ``free`` is the answer without settings; each setting changes it."""
    pair = [tuple(free[i : i + 2]) for i in (1, 4)]
    return [
        {"bad_word_ids": (tuple(free[2:5]), *pair)},
        {"bad_word_ids": ((free[0],), (free[3],), pair[1])},
        {"logit_bias": {free[0]: -7.5, free[5]: 3.0, 9: 2.25}},
        {"allowed_token_ids": tuple(range(5, 400, 7)), "logit_bias": {12: 1.5, 13: 99.0}},
        {},
    ]


@pytest.mark.parametrize(
    ("architecture", "mode", "num_drafts"),
    [
        ("Qwen3ForCausalLM", "FULL_DECODE_ONLY", 0),
        slow("Qwen3ForCausalLM", "PIECEWISE", 0),
        slow("DeepseekV3ForCausalLM", "FULL_DECODE_ONLY", 2),
    ],
)
def test_tokens_equal_those_of_transformers(
    references: Any, architecture: str, mode: str, num_drafts: int
) -> None:
    reference = references(architecture)
    config = make_deployment_config(
        reference.directory,
        parallel={"tp": 2},
        graph={"mode": mode},
        scheduler={"steps_in_flight": 2},
        speculative={"num_tokens": num_drafts},
    )
    wanted, asked = [], []
    for i, (prompt, free) in enumerate(zip(reference.prompts, reference.tokens, strict=True)):
        settings = settings_for(free)[i % 5]
        wanted.append(expected(reference.model, prompt, settings))
        asked.append(greedy_params(NUM_TOKENS, **settings))

    with lockstep(config) as group:
        answers = [
            group.submit(f"r{i}", prompt, params)
            for i, (prompt, params) in enumerate(zip(reference.prompts, asked, strict=True))
        ]
        group.finish()

    assert [answer.tokens for answer in answers] == wanted
    changed = sum(
        tokens != free[:NUM_TOKENS] for tokens, free in zip(wanted, reference.tokens, strict=True)
    )
    assert changed >= len(wanted) * 3 // 5
