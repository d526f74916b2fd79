"""After random requests to a hybrid model with all features, all slots, checkpoints and blocks are
free again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import RequestDelta
from tests.checkpoints import add_next_token_module, make_reference
from tests.engine.conftest import NUM_GUESSABLE
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, turn
from tests.engine.stale_slots import poison_stale_slots
from tests.engine.states.test_hybrid_laws import capture, cold, guessing
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, MAX_TOKENS, Arrival
from tests.laws import count
from tests.unit.scheduler.requests import submit

NUM_CHECKPOINTS, NUM_BLOCKS, NUM_DRAFTS, LONGEST = 3, 14, 1, 16


@dataclass
class Traffic:
    """Requests with prompts from a small set, and their answers.

    Attributes:
        expected: for each prompt, the longest answer that any request can get.
        got: for each request, its prompt and its tokens.
    """

    runner: ModelRunner
    plan: GraphPlan
    expected: dict[tuple[int, ...], list[int]]
    chance: random.Random = field(default_factory=lambda: random.Random(5))
    got: dict[str, tuple[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(NUM_CHECKPOINTS, 1)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
            [BlockPool(NUM_BLOCKS, BLOCK_SIZE, checkpoints=self.checkpoints)],
            GraphDispatcher(self.plan),
            max_model_len=MAX_LEN,
            num_drafts=NUM_DRAFTS,
        )

    def submit(self) -> None:
        name, prompt = str(len(self.got)), self.chance.choice(list(self.expected))
        count = self.chance.randint(1, LONGEST)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.scheduler.add(submit(name, prompt, params))
        self.got[name] = (prompt, [])

    def step(self, number: int) -> None:
        chance, scheduler = self.chance, self.scheduler
        if len(scheduler.waiting.queue) < MAX_SEQS and chance.random() < 0.4:
            self.submit()
        if chance.random() < 0.05 and self.got:
            output = scheduler.abort(chance.choice(list(self.got)[-9:]))
            self.take([] if output is None else [output])
        if chance.random() < 0.04:  # undoes the steps in flight, as an abort does
            self.runner.forget_steps()
            scheduler.rewind(scheduler.epoch + 1)
        if number % 200 == 100:
            self.exchange_graphs()
        self.turn()

    def turn(self) -> None:
        self.take(turn(self.scheduler, self.runner))
        poison_stale_slots(self.runner, self.scheduler)
        self.check_owners()

    def take(self, outputs: Iterable[RequestDelta]) -> None:
        for output in outputs:
            prompt, tokens = self.got[output.request_id]
            tokens += output.tokens
            assert tokens == self.expected[prompt][: len(tokens)]

    def exchange_graphs(self) -> None:
        """Between two steps, choose a graph; release it, or capture it again if it was released."""
        while self.runner.is_busy:
            self.take(self.scheduler.update([self.runner.finish()]))
        graph, dispatcher = self.chance.choice(self.plan.capture_order), self.scheduler.dispatcher
        if graph in dispatcher.graphs:
            dispatcher.remove(graph)
            self.runner.release(graph)
        else:
            self.runner.warm_up(graph)
            self.runner.capture(graph)
            self.runner.commit(graph)
            dispatcher.add(graph)

    def check_owners(self) -> None:
        """Check that each row, checkpoint and block has exactly one owner, or is free."""
        [rank], kept = self.scheduler.ranks, self.checkpoints
        assert len({request.row for request in rank.running}) == len(rank.running)
        assert rank.num_free_rows == MAX_SEQS - len(rank.running)
        numbers = [*kept._free, *kept._stored.values(), *kept._begun.values()]
        assert sorted(numbers) == list(range(NUM_CHECKPOINTS))
        used = {block for request in rank.running for block in request.block_ids}
        assert rank.pool.num_used == len(used)


def make_small_hybrid(directory: Path) -> None:
    """Write a hybrid model of two layers, whose drafts are often right."""
    make_reference(
        "Qwen3_5ForCausalLM",
        directory,
        vocab_size=NUM_GUESSABLE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    add_next_token_module(directory)


@pytest.mark.slow
def test_random_steps_give_every_slot_checkpoint_and_block_back(npu: Any, tmp_path: Path) -> None:
    make_small_hybrid(tmp_path)
    chance = random.Random(3)
    # There are more prefixes than checkpoints, so that checkpoints are evicted all the time.
    prompts = [
        tuple(chance.choices(range(NUM_GUESSABLE), k=shared)) + (own,) * (own + 1)
        for shared in (32, 64, 96)
        for own in range(4)
    ]
    arrivals = [Arrival(0, prompt, LONGEST, None) for prompt in prompts]
    answers = cold(capture(npu, tmp_path, EAGER, 0), arrivals)
    runner, plan = guessing(npu, tmp_path, NUM_DRAFTS)["graphs"]
    traffic = Traffic(runner, plan, dict(zip(prompts, answers.values(), strict=True)))

    for number in range(count(2000)):
        traffic.step(number)
    while traffic.scheduler.has_work:
        traffic.turn()

    [rank], stats = traffic.scheduler.ranks, traffic.scheduler.stats()
    assert (rank.num_running, rank.pool.num_used, rank.num_free_rows) == (0, 0, MAX_SEQS)
    assert not traffic.checkpoints._begun
    assert len(traffic.got) > count(300)
    assert stats["preemptions"] > 0 and stats["cached_tokens"] > 0
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
