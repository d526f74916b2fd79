"""The demo model's drafts are accepted often enough, and drafts do not change the distribution of
sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import RankBatch, RankPlan
from tests.checkpoints import add_next_token_module, make_reference
from tests.engine.runners import make_runner, size_of
from tests.engine.steps.test_drafts_law import DEMO, make_runners
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, run
from tests.slow import slow

PROMPTS = [
    "Count from 3 to 20.",
    "Count down from 31 to 12.",
    "Tell me a story about a fox in the forest.",
    "Hello!",
    "who are you",
    "Repeat: fox 7 red",
]


def ask(text: str) -> Arrival:
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return Arrival(0, tuple(tokenizer.encode(chat).ids), 60, None)


def acceptance(scheduler: Scheduler) -> list[float]:
    """Return, for each draft position, the fraction of its drafts that were accepted."""
    [rank] = scheduler.ranks
    return [accepted / rank.num_verified for accepted in rank.accepted_by_position]


@pytest.mark.parametrize("k", [slow(1), 3])
def test_drafts_of_the_demo_model_pass_as_often_in_graphs_as_eagerly(npu: Any, k: int) -> None:
    arrivals = [ask(text) for text in PROMPTS]
    found = {}
    for name, (runner, plan) in make_runners(npu, DEMO, k).items():
        _, scheduler = run(runner, plan, arrivals, 64, k, ignore_eos=False)
        found[name] = acceptance(scheduler)

    assert found["full"] == found["both"] == found["eager"]
    assert found["eager"][0] >= 0.8
    assert found["eager"] == sorted(found["eager"], reverse=True)


class BesideABusierRank:
    """A runner whose steps are padded, because another data-parallel rank has a larger batch."""

    def __init__(self, runner: ModelRunner, records: list[int]) -> None:
        self._runner = runner
        self._other = RankBatch(pack_ints(records))

    def launch(self, plan: RankPlan, rank: int, report: Any) -> None:
        largest = size_of((plan.batch, self._other))
        plan = msgspec.structs.replace(plan, largest=largest, exchange="all_gather")
        self._runner.launch(plan, rank, report)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.mark.parametrize("k", [slow(1), 3])
def test_drafts_pass_as_often_beside_a_busier_rank(npu: Any, k: int) -> None:
    arrivals = [ask(PROMPTS[2])]
    runner = make_runner(npu, DEMO, MAX_SEQS, num_drafts=k)
    busier: Any = BesideABusierRank(runner, [x for row in range(5) for x in (row, 9, k + 1, k + 1)])
    tokens, scheduler = run(runner, EAGER, arrivals, 64, k)

    beside_tokens, beside = run(busier, EAGER, arrivals, 64, k)

    assert beside_tokens == tokens
    assert acceptance(beside) == acceptance(scheduler)


VOCAB, FIRST, CHANCE = 11, 40, 1e-3


@pytest.mark.slow
def test_tokens_sampled_with_drafts_follow_the_models_distribution(
    npu: Any, tmp_path: Path
) -> None:
    model = make_reference("DeepseekV3ForCausalLM", tmp_path, vocab_size=VOCAB)
    add_next_token_module(tmp_path)
    prompt, temperature, num_seeds, k = [3, 1, 4], 2.0, 1200, 2
    runner = make_runner(npu, tmp_path, MAX_SEQS, num_drafts=k)
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(0, num_seeds, FIRST):
        arrivals = [Arrival(0, tuple(prompt), 3, None) for _ in range(FIRST)]
        seeds = {str(i): seed + i for i in range(FIRST)}
        tokens, scheduler = run(
            runner, EAGER, arrivals, 64, k, temperature=temperature, seeds=seeds
        )
        seen.update(tuple(answer[1:]) for answer in tokens.values())
        accepted += sum(scheduler.ranks[0].accepted_by_position)

    # Each of the second and third tokens is either an accepted draft, or a token that was sampled
    # because a draft was wrong.
    expected = pairs_after_the_first(model, prompt, temperature) * num_seeds
    observed = np.zeros((VOCAB, VOCAB))
    for (second, third), count in seen.items():
        observed[second, third] = count
    enough = expected >= 5  # the usual condition for a chi-square test
    cells = [*zip(observed[enough], expected[enough], strict=True)]
    cells.append((observed[~enough].sum(), expected[~enough].sum()))
    got, wanted = np.asarray(cells).T
    assert accepted > 0
    statistic = float(((got - wanted) ** 2 / wanted).sum())
    # The probability of a larger chi-square value is a regularised incomplete gamma function.
    freedom = torch.tensor((len(got) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    assert float(tail) > CHANCE


def pairs_after_the_first(model: Any, prompt: list[int], temperature: float) -> np.ndarray:
    """Return the probability of each pair [second token, third token], summed over all first
    tokens.
    """

    def next_of(rows: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            return (model(torch.tensor(rows)).logits[:, -1].double() / temperature).softmax(-1)

    tokens = range(VOCAB)
    first = next_of([prompt])[0]
    second = next_of([[*prompt, a] for a in tokens])
    third = next_of([[*prompt, a, b] for a in tokens for b in tokens]).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third).numpy()


def test_requests_whose_drafts_may_not_pass_count_for_no_share(npu: Any) -> None:
    runner = make_runner(npu, DEMO, MAX_SEQS, num_drafts=1)

    tokens, scheduler = run(runner, EAGER, [ask(PROMPTS[0])], 64, 1, frequency_penalty=0.1)

    [rank] = scheduler.ranks
    assert len(tokens["0"]) > 1
    assert (rank.num_verified, rank.accepted_by_position) == (0, [0])
