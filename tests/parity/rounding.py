"""Checks that each token of an answer in bfloat16 is the most probable token, except for rounding
errors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.checkpoints import logprobs
from tests.parity.conftest import Reference


def assert_best_but_for_rounding(reference: Reference, answers: list[list[int]]) -> None:
    """Assert that the exact log-probability of each token is close to the largest log-probability.

    The tolerance is three times the largest error of transformers' log-probabilities in bfloat16,
    plus 0.02.
    """
    rounded = copy.deepcopy(reference.model).bfloat16()
    pairs = list(zip(reference.prompts, answers, strict=True))
    lost = [losses(reference.model, *pair) for pair in pairs]
    noise = [
        (logprobs(rounded, *pair) - logprobs(reference.model, *pair)).abs().max() for pair in pairs
    ]
    assert max(map(max, lost)) <= 3 * float(max(noise)) + 0.02


def losses(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Return, for each token, the difference between the largest log-probability at the token's
    position and the log-probability of the token.
    """
    found = logprobs(model, prompt, answer)
    chosen = found.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return (found.max(-1).values - chosen).tolist()
