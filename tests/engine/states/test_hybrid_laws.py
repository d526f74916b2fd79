"""Laws of models with recurrent state, for any order of requests.

Graphs, drafts, shared prefixes, preemptions and undone steps change no token. A request's step
reads only slots that this request has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.checkpoints import make_prompts
from tests.engine.conftest import NUM_GUESSABLE
from tests.engine.runners import FLOAT32, make_runner
from tests.engine.stale_slots import poison_stale_slots
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, run
from tests.laws import examples
from tests.plans import make_plan
from tests.slow import slow

PREFIX = make_prompts([96])[0]
PLANS = {
    "FULL_DECODE_ONLY": make_plan(1, 2, 4, 6, max_num_seqs=MAX_SEQS),
    "PIECEWISE": make_plan(4, 16, 40, mode="PIECEWISE", max_num_seqs=MAX_SEQS),
    "FULL_AND_PIECEWISE": make_plan(2, 5, mixed=(8, 48), max_num_seqs=MAX_SEQS),
}
Runners = dict[str, tuple[ModelRunner, GraphPlan]]

arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        prompt=st.tuples(
            st.integers(0, 96), st.lists(st.integers(0, 500), min_size=1, max_size=20)
        ).map(lambda parts: (*PREFIX[: parts[0]], *parts[1])),
        max_tokens=st.integers(1, 12),
        abort_at=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    ),
    min_size=1,
    max_size=9,
)


# Numbers of turns. After each of these turns, the steps in flight are undone, as after an abort of
# the device.
undone = st.sets(st.integers(0, 30), max_size=3)


def undo(runner: ModelRunner, turns: set[int]) -> Callable[[Scheduler], None]:
    """Return a function that must be called after each turn.

    After each turn whose number is in ``turns``, the function first undoes the steps in flight. It
    always fills stale slots with NaN.
    """
    number = -1

    def after_turn(scheduler: Scheduler) -> None:
        nonlocal number
        number += 1
        if number in turns:
            runner.forget_steps()
            scheduler.rewind(scheduler.epoch + 1)
        poison_stale_slots(runner, scheduler)

    return after_turn


def poison(runner: ModelRunner) -> None:
    """Fill all recurrent states with NaN, because failed requests can leave NaN there. Results must
    not change.
    """
    for states in runner.caches.state_tensors():
        states.fill_(torch.nan)


def capture(npu: Any, directory: Path, plan: GraphPlan, k: int, **settings: Any) -> ModelRunner:
    runner = make_runner(npu, directory, MAX_SEQS, plan.capture_order, k, FLOAT32 | settings)
    for graph in plan.capture_order:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    return runner


@pytest.fixture(scope="module")
def eager(npu: Any, hybrid: Path) -> ModelRunner:
    return capture(npu, hybrid, EAGER, 0)


def cold(runner: ModelRunner, arrivals: list[Arrival]) -> dict[str, list[int]]:
    """Return the tokens of requests that run alone, without a shared prefix."""
    found: dict[str, list[int]] = {}
    for index, arrival in enumerate(arrivals):
        alone = Arrival(0, arrival.prompt, arrival.max_tokens, None)
        tokens, _ = run(runner, EAGER, [alone], 40, checkpoints=Checkpoints(0, 1))
        found[str(index)] = tokens["0"]
    return found


def assert_equal(found: dict[str, list[int]], expected: dict[str, list[int]], name: str) -> None:
    """Check that each request's tokens are a prefix of its expected tokens. Aborted requests have
    fewer tokens than expected.
    """
    for index, tokens in found.items():
        assert tokens == expected[index][: len(tokens)], name


@pytest.fixture(scope="module", params=["hybrid", slow("kimi_linear")])
def runners(npu: Any, request: pytest.FixtureRequest) -> Runners:
    directory = request.getfixturevalue(request.param)
    plans = {"NONE": EAGER, **PLANS}
    return {mode: (capture(npu, directory, plan, 0), plan) for mode, plan in plans.items()}


@examples(30)
@given(arrivals, st.integers(12, 40), st.integers(0, 6), st.integers(1, 2), undone)
def test_every_mode_gives_the_tokens_of_requests_alone(
    runners: Runners,
    arrivals: list[Arrival],
    num_blocks: int,
    num_checkpoints: int,
    interval: int,
    undone: set[int],
) -> None:
    expected = cold(runners["NONE"][0], arrivals)

    for mode, (runner, plan) in runners.items():
        kept = Checkpoints(num_checkpoints, interval)
        poison(runner)
        found, scheduler = run(
            runner, plan, arrivals, num_blocks, checkpoints=kept, after_turn=undo(runner, undone)
        )

        assert_equal(found, expected, mode)
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)


@pytest.fixture(scope="module", params=[slow(1), 3])
def drafting(npu: Any, hybrid: Path, request: pytest.FixtureRequest) -> tuple[int, Runners]:
    k = request.param
    decode = tuple((k + 1) * size for size in (1, 2, 4, MAX_SEQS))
    plan = make_plan(*decode, mixed=(16, 48), query_len=k + 1, max_num_seqs=MAX_SEQS)
    one = {"scheduler": {"max_num_seqs": MAX_SEQS, "steps_in_flight": 1}}
    return k, {
        name: (capture(npu, hybrid, each, k, **one), each)
        for name, each in {"eager": EAGER, "graphs": plan}.items()
    }


@examples(15)
@given(
    arrivals,
    st.integers(12, 40),
    st.integers(0, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_accepted_and_rejected_drafts_change_no_token(
    drafting: tuple[int, Runners],
    eager: ModelRunner,
    arrivals: list[Arrival],
    num_blocks: int,
    num_checkpoints: int,
    right: list[int],
) -> None:
    """``right`` contains the number of right drafts of each step. After the last number, the first
    number is used again.
    """
    expected = cold(eager, arrivals)
    k, runners = drafting
    for name, (runner, plan) in runners.items():
        turns = 0

        def propose(scheduler: Scheduler, runner: ModelRunner = runner) -> None:
            nonlocal turns
            turns += 1
            for request in scheduler.running:
                set_drafts(runner, scheduler, request, expected, min(k, right[turns % len(right)]))
            poison_stale_slots(runner, scheduler)

        found, scheduler = run(
            runner, plan, arrivals, num_blocks, k,
            checkpoints=Checkpoints(num_checkpoints, 1), after_turn=propose,
        )  # fmt: skip

        assert_equal(found, expected, name)
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)


def set_drafts(
    runner: ModelRunner,
    scheduler: Scheduler,
    request: Any,
    expected: dict[str, list[int]],
    num_right: int,
) -> None:
    """Replace the drafts of a request by ``num_right`` right tokens and then wrong tokens."""
    rows = scheduler.ranks[0].rows
    rows.settle(rows.index_of(request))
    done = len(request.tokens) - request.num_prompt_tokens
    coming = expected[request.request_id][done:]
    drafts = runner._drafts.drafts  # type: ignore[union-attr]
    for place in range(drafts.shape[1]):
        token = coming[place] if place < min(num_right, len(coming)) else 502
        drafts[request.row, place] = token


def guessable_of(arrivals: list[Arrival]) -> list[Arrival]:
    """Return the arrivals, with their tokens changed to tokens of the small vocabulary."""
    return [
        replace(each, prompt=tuple(token % NUM_GUESSABLE for token in each.prompt))
        for each in arrivals
    ]


def guessing(
    npu: Any,
    directory: Path,
    k: int,
    sizes: Sequence[int] = (1, 2, 4, MAX_SEQS),
    mixed: tuple[int, ...] = (16, 48),
    **settings: Any,
) -> Runners:
    """Return an eager runner and a runner with graphs.

    Both runners use the drafts of the next-token module, and have several steps in flight.
    """
    decode = tuple((k + 1) * size for size in sizes)
    plan = make_plan(*decode, mixed=mixed, query_len=k + 1, max_num_seqs=MAX_SEQS)
    return {
        name: (capture(npu, directory, each, k, **settings), each)
        for name, each in {"eager": EAGER, "graphs": plan}.items()
    }


@pytest.fixture(scope="module", params=[slow(1), slow(3)])
def module_drafts(npu: Any, guessable: Path, request: Any) -> tuple[int, Runners, ModelRunner]:
    k = request.param
    return k, guessing(npu, guessable, k), capture(npu, guessable, EAGER, 0)


@examples(15)
@given(arrivals, st.integers(12, 40), st.integers(0, 6), undone)
def test_drafts_of_several_steps_in_flight_change_no_token(
    module_drafts: tuple[int, Runners, ModelRunner],
    arrivals: list[Arrival],
    num_blocks: int,
    num_checkpoints: int,
    undone: set[int],
) -> None:
    k, runners, alone = module_drafts
    arrivals = guessable_of(arrivals)
    expected = cold(alone, arrivals)
    for name, (runner, plan) in runners.items():
        poison(runner)
        found, scheduler = run(
            runner, plan, arrivals, num_blocks, k,
            checkpoints=Checkpoints(num_checkpoints, 1), after_turn=undo(runner, undone),
        )  # fmt: skip

        assert_equal(found, expected, name)
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)


def test_random_drafts_of_few_tokens_are_often_accepted(
    module_drafts: tuple[int, Runners, ModelRunner],
) -> None:
    k, runners, _ = module_drafts
    arrivals = guessable_of([Arrival(0, tuple(range(i, 40)), 25, None) for i in range(6)])
    for runner, plan in runners.values():
        _, scheduler = run(runner, plan, arrivals, 40, k, checkpoints=Checkpoints(0, 1))
        [rank] = scheduler.ranks

        assert 0.1 < rank.accepted_by_position[0] / rank.num_verified < 0.9


@pytest.fixture(scope="module", params=[0, slow(2)])
def in_bfloat16(npu: Any, guessable: Path, request: Any) -> tuple[int, Runners]:
    # There is a graph of every size, so no batch is padded. In a padded batch, results can be
    # rounded in another way than without padding.
    sizes = range(1, MAX_SEQS + 1)
    return request.param, guessing(npu, guessable, request.param, sizes, (), dtype="bfloat16")


@examples(12)
@given(arrivals, st.integers(12, 40), st.integers(0, 6))
def test_graphs_of_canns_operators_equal_eager_steps_bit_by_bit(
    in_bfloat16: tuple[int, Runners],
    arrivals: list[Arrival],
    num_blocks: int,
    num_checkpoints: int,
) -> None:
    k, runners = in_bfloat16
    arrivals = guessable_of(arrivals)
    found = []
    for runner, plan in runners.values():
        kept = Checkpoints(num_checkpoints, 1)
        tokens, _ = run(runner, plan, arrivals, num_blocks, k, checkpoints=kept)
        tensors = [states.view(torch.int16) for states in runner.caches.state_tensors()]
        found.append((tokens, [states[1:].cpu() for states in tensors]))

    (eager, states), (graphs, others) = found
    assert graphs == eager
    # All slots must have the same bits, except the slot of padding.
    assert all(map(torch.equal, states, others))
