"""With ``exact``, a request that continues in another group gets the same tokens, even in
bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.checkpoints import make_prompts
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.plans import make_plan
from tests.slow import slow
from tests.unit.scheduler.requests import submit

STREAMS, ROWS, COUNT = 48, 16, 48
PROMPTS = make_prompts([8, 12, 20, 31] * (STREAMS // 4))
PLAN = make_plan(ROWS, max_num_seqs=ROWS)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.3, "logprobs": 1},
]


class Got(NamedTuple):
    """The output of one request.

    Attributes:
        logprobs: for each position, the log-probabilities of the chosen token and of the most
            probable tokens. The ids of these tokens are left out, because the order of equally
            probable tokens depends on other requests.
    """

    tokens: list[int]
    logprobs: list[tuple[float, ...]]


def play(
    runner: ModelRunner, outputs: Sequence[list[int]], *, exact: bool, num_blocks: int = 64
) -> list[Got]:
    """Run all requests. Request i already has the tokens ``outputs[i]``; return the rest of each
    output.

    Args:
        num_blocks: number of blocks of the cache; with fewer than 50, requests are preempted.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64),
        [BlockPool(num_blocks, BLOCK_SIZE, prefix_cache=False)],
        GraphDispatcher(PLAN),
        max_model_len=MAX_LEN,
        exact=exact,
    )
    order = list(range(STREAMS))
    random.Random(len(outputs[0])).shuffle(order)  # so that each run has other batches
    for index in order:
        more = SAMPLINGS[index % len(SAMPLINGS)]
        params = SamplingParams(max_tokens=COUNT, seed=index, ignore_eos=True, **more)
        scheduler.add(submit(str(index), PROMPTS[index], params, output=outputs[index]))
    got = [Got([], []) for _ in outputs]
    while scheduler.has_work:
        for delta in turn(scheduler, runner):
            one = got[int(delta.request_id)]
            one.tokens.extend(delta.tokens)
            reports = delta.logprobs or [None] * len(delta.tokens)
            one.logprobs.extend(() if report is None else report.logprobs for report in reports)
    assert (scheduler.num_preemptions > 0) == (num_blocks < 50)
    return got


@pytest.fixture(
    scope="module",
    params=[
        slow(("checkpoint", 1)),
        ("checkpoint", 2),
        slow(("deepseek", 2)),
        slow(("hybrid", 2)),
    ],
    ids=["one-in-flight", "two-in-flight", "latent-with-experts", "hybrid"],
)
def runner(npu: Any, request: pytest.FixtureRequest) -> ModelRunner:
    name, in_flight = request.param
    checkpoint: Path = request.getfixturevalue(name)
    scheduler = {"max_num_seqs": ROWS, "steps_in_flight": in_flight}
    settings = {"dtype": "bfloat16", "scheduler": scheduler}
    runner = make_runner(npu, checkpoint, ROWS, PLAN.capture_order, 0, settings)
    for graph in PLAN.capture_order:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    return runner


@pytest.fixture(scope="module")
def whole(runner: ModelRunner) -> list[Got]:
    """The outputs of all requests without an interruption."""
    return play(runner, [[] for _ in PROMPTS], exact=True)


def continued(runner: ModelRunner, whole: list[Got], cut: int, *, exact: bool) -> list[int]:
    """Continue all requests after ``cut`` tokens of output; return the indices of the requests
    whose output differs from ``whole``.
    """
    rest = play(runner, [one.tokens[:cut] for one in whole], exact=exact)
    return [
        index
        for index, (one, more) in enumerate(zip(whole, rest, strict=True))
        if (one.tokens[cut:], one.logprobs[cut:]) != more
    ]


def test_replayed_output_leads_to_the_same_tokens_and_log_probabilities(
    runner: ModelRunner, whole: list[Got]
) -> None:
    assert [continued(runner, whole, cut, exact=True) for cut in (1, 30)] == [[], []]


def test_who_is_preempted_gets_the_same_tokens(runner: ModelRunner, whole: list[Got]) -> None:
    assert play(runner, [[] for _ in PROMPTS], exact=True, num_blocks=24) == whole


def test_output_that_is_computed_like_a_prompt_leads_to_other_tokens(runner: ModelRunner) -> None:
    """Without ``exact``, earlier output is computed like a prompt, and rounding then changes some
    tokens.
    """
    whole = play(runner, [[] for _ in PROMPTS], exact=False)

    assert continued(runner, whole, 30, exact=False)
