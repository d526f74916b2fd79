"""The demo models were trained to count, and count correctly with and without shared contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.context.prompt_split import MAX_WHOLE_QUERIES
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.deployments import greedy_params
from tests.lockstep import lockstep
from tests.slow import slow

CONFIGS = Path(__file__).parents[3] / "configs"
COUNT, COUNTED = "Count from 3 to 9.", "3 4 5 6 7 8 9"
QUESTIONS = {
    COUNT: 8,
    "Tell me a story about a fox in the forest.": 53,
}  # number of output tokens for each prompt


def answers(name: str) -> list[str]:
    config = load_config(CONFIGS / f"{name}.yaml")
    tokenizer = Tokenizer(config.model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    assert max(map(len, prompts)) > MAX_WHOLE_QUERIES  # otherwise no prompt is split
    with lockstep(config) as group:
        found = [
            group.submit(text, prompt, greedy_params(count))
            for (text, count), prompt in zip(QUESTIONS.items(), prompts, strict=True)
        ]
        group.finish()
    return [tokenizer.decode(answer.tokens) for answer in found]


@pytest.mark.slow
def test_ranks_that_share_contexts_answer_as_others_do() -> None:
    shared = answers("tiny-deepseek-cp")

    assert shared == answers("tiny-deepseek")
    assert shared[0] == COUNTED


@pytest.mark.parametrize("name", ["tiny-qwen3.5", slow("tiny-deepseek-v32")])
def test_a_demo_counts(name: str) -> None:
    assert answers(name)[0] == COUNTED
