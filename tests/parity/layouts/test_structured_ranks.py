"""Requests with grammars get the same tokens on several ranks as on one rank, even if steps are run
again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dist_aclgraph.sampling import SamplingParams
from tests.deployments import make_deployment_config
from tests.engine.sampling.test_structured import (
    DEMO,
    END,
    STRUCTURED,
    TOKENIZER,
    VALID,
    answer_of,
    thought,
)
from tests.lockstep import lockstep
from tests.slow import slow

PROMPTS = ["Hello", "json: ", "1 2 3", "Count from 3 to 9.", "a b c", "x", "y"]
KINDS = ["json", "regex", "", "choice", "json", "thought", "slow"]
BASE: dict[str, Any] = {"scheduler": {"steps_in_flight": 2}, "graph": {"mode": "FULL_DECODE_ONLY"}}


def params_of(kind: str, seed: int) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 48, "temperature": 0.8, "seed": seed}
    if kind == "slow":
        structure = replace(STRUCTURED["regex"]["structure"], is_slow=True)
        return SamplingParams(**settings | STRUCTURED["regex"] | {"structure": structure})
    if kind == "thought":
        grammar = STRUCTURED["regex"]["structure"].grammar
        structure = thought(grammar=grammar, is_thinking=True, max_thought=4)
        return SamplingParams(**settings | STRUCTURED["regex"] | {"structure": structure})
    return SamplingParams(**settings | STRUCTURED.get(kind, {}))


def play(**changes: Any) -> list[list[int]]:
    config = make_deployment_config(DEMO, **BASE | changes)
    with lockstep(config) as group:
        answers = [
            group.submit(f"r{i}", TOKENIZER.encode(prompt), params_of(kind, i))
            for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
        ]
        group.finish()
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return play()


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"tp": 2}},
        slow({"parallel": {"tp": 2}, "speculative": {"num_tokens": 2}}),
        slow({"parallel": {"tp": 2}, "graph": {"mode": "NONE"}}),
        slow({"parallel": {"tp": 2, "dp": 2, "ep": 4, "expert_capacity": 1.0}}),
    ],
    ids=str,
)
def test_ranks_get_the_tokens_of_one_rank(alone: list[list[int]], changes: dict[str, Any]) -> None:
    found = play(**changes)

    assert found == alone
    for kind, tokens in zip(KINDS, found, strict=True):
        if kind and tokens[-1] == END:
            structure = params_of(kind, 0).structure
            assert structure is not None
            text = TOKENIZER.decode(answer_of(structure, tokens)[:-1])
            assert VALID["regex" if kind in ("thought", "slow") else kind](text)
