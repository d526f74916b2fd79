"""Answers in bfloat16 against exact ones: each token the most probable, but for rounding."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.checkpoints import logprobs
from tests.parity.conftest import Reference


def assert_best_but_for_rounding(reference: Reference, answers: list[list[int]]) -> None:
    """Each token may be as far from the best as transformers in bfloat16 is, give or take."""
    rounded = copy.deepcopy(reference.model).bfloat16()
    pairs = list(zip(reference.prompts, answers, strict=True))
    lost = [losses(reference.model, *pair) for pair in pairs]
    noise = [
        (logprobs(rounded, *pair) - logprobs(reference.model, *pair)).abs().max() for pair in pairs
    ]
    assert max(map(max, lost)) <= 3 * float(max(noise)) + 0.02


def losses(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """How much less likely than the best one each token of the answer is."""
    found = logprobs(model, prompt, answer)
    chosen = found.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return (found.max(-1).values - chosen).tolist()
