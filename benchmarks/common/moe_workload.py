"""Chat requests for the demo model. The model's answers are real text, so the share of accepted
drafts is realistic.
"""

from __future__ import annotations

import itertools

from benchmarks.common.workload import Arrival
from dist_aclgraph.text.tokenizer import Tokenizer

ANIMALS = ("fox", "cat", "dog", "owl", "bear", "duck", "frog", "lion")
NAMES = ("Mia", "Tom")
# The answers to these questions end after a few tokens. (The stories of ``chat_workload`` are
# longer than a run.)
QUESTIONS = ("Who are you?", "Count from 3 to 9.", "Hello!", "Count down from 12.")
EXTRA_TOKENS = 8  # additional output tokens of all requests except the first request
LATER_TOKENS = 6


def chat_workload(tokenizer: Tokenizer, batch: int, steps: int) -> list[Arrival]:
    """Return a batch of requests that ask for stories. All requests arrive at the same time."""
    asks = [
        f"Tell me a story about a {animal} named {name}." for name in NAMES for animal in ANIMALS
    ]
    return [
        Arrival(_prompt(tokenizer, ask), steps + (EXTRA_TOKENS if index else 0))
        for index, ask in enumerate(itertools.islice(itertools.cycle(asks), batch))
    ]


def mixed_chat_workload(tokenizer: Tokenizer, batch: int, steps: int) -> list[Arrival]:
    """Return a batch of requests that ask for stories, and further requests that ask questions.

    After every fourth token of the first request, one question arrives.
    """
    later = [
        Arrival(_prompt(tokenizer, question), LATER_TOKENS, at)
        for question, at in zip(itertools.cycle(QUESTIONS), range(2, steps - 2, 4), strict=False)
    ]
    return chat_workload(tokenizer, batch, steps) + later


def _prompt(tokenizer: Tokenizer, ask: str) -> list[int]:
    text = tokenizer.render_chat([{"role": "user", "content": ask}])
    return tokenizer.encode(text, add_special_tokens=False)
