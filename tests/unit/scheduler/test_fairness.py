"""Requests share the tokens of each step: no prompt waits until a long prompt has ended, and no
request starves.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import StepPlan, StepResult
from tests.laws import examples
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

STEP_TOKENS = 64
SHARE = 16
LONG = 2000


def make_scheduler(
    *, dp: int = 1, max_num_seqs: int = 16, share: int | None = SHARE, exact: bool = False
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=STEP_TOKENS,
            long_prompt_tokens=share,
        ),
        [BlockPool(5000, 16, prefix_cache=False) for _ in range(dp)],
        GraphDispatcher(make_plan(1, 8)),
        max_model_len=4096,
        exact=exact,
    )


def run_step(scheduler: Scheduler) -> tuple[StepPlan, list[str]]:
    """Run one step; return its plan and the names of the requests that got a token."""
    plan = scheduler.schedule()
    assert plan is not None
    results = []
    for rank, batch in enumerate(plan.batches):
        num_samples = int((unpack_ints(batch.scheduled, 4)[:, 3] > 0).sum())
        results.append(StepResult(plan.epoch, plan.step, rank, pack_ints([9] * num_samples)))
    return plan, [delta.request_id for delta in scheduler.update(results)]


def add(scheduler: Scheduler, name: str, num_tokens: int, max_tokens: int = 4) -> Request:
    request = submit(name, [1] * num_tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    scheduler.add(request)
    return request


def lengths(plan: StepPlan) -> list[int]:
    return unpack_ints(plan.batches[0].scheduled, 4)[:, 2].tolist()


def test_a_short_prompt_behind_a_long_one_runs_in_the_same_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, "long", LONG)
    run_step(scheduler)
    add(scheduler, "short", 10)

    plan, sampled = run_step(scheduler)

    assert sampled == ["short"]
    assert sum(lengths(plan)) == STEP_TOKENS


def test_a_long_prompt_that_is_alone_gets_the_whole_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, "long", LONG)

    plan, _ = run_step(scheduler)

    assert lengths(plan) == [STEP_TOKENS]


def test_long_prompts_share_a_step() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, LONG)

    plan, _ = run_step(scheduler)

    assert lengths(plan) == [SHARE + STEP_TOKENS - 3 * SHARE, SHARE, SHARE]


def test_requests_that_decode_come_before_an_older_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=STEP_TOKENS)
    add(scheduler, "long", LONG)
    run_step(scheduler)
    for index in range(STEP_TOKENS - 1):
        add(scheduler, str(index), 1, max_tokens=50)

    sampled: list[str] = []
    while len(set(sampled)) < STEP_TOKENS - 1:
        sampled += run_step(scheduler)[1]
    plan, sampled = run_step(scheduler)

    assert len(sampled) == STEP_TOKENS - 1
    assert lengths(plan) == [1] * STEP_TOKENS, "the last token is the prompt's"


def test_prompts_and_those_that_decode_take_turns_where_continuations_are_exact() -> None:
    scheduler = make_scheduler(exact=True)
    add(scheduler, "first", 10, max_tokens=50)
    add(scheduler, "second", 10, max_tokens=50)
    add(scheduler, "long", LONG)
    add(scheduler, "short", 10)

    steps = [run_step(scheduler) for _ in range(9)]

    assert [lengths(plan) for plan, _ in steps] == [
        [10], [1], [10], [1, 1], [10], [1, 1, 1], [STEP_TOKENS], [1, 1, 1], [STEP_TOKENS],
    ]  # fmt: skip
    assert [set(sampled) for _, sampled in steps[:6]] == [
        {"first"}, {"first"}, {"second"}, {"first", "second"}, {"short"},
        {"first", "second", "short"},
    ]  # fmt: skip


def test_output_that_a_request_comes_with_runs_beside_those_that_decode() -> None:
    scheduler = make_scheduler(exact=True)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    add(scheduler, "other", 10, max_tokens=50)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(submit("resumed", [1] * 10, params, output=[9, 9, 9]))

    steps = [run_step(scheduler) for _ in range(6)]

    assert [lengths(plan) for plan, _ in steps] == [[10], *[[1, 1]] * 5]
    assert [sampled for _, sampled in steps] == [
        [], ["other"], ["other"], ["other", "resumed"], ["other", "resumed"], ["other", "resumed"],
    ]  # fmt: skip
    assert all(plan.graph is not None for plan, _ in steps[1:])


@pytest.mark.parametrize("stream", [10, 200])
def test_a_long_prompt_is_served_in_an_endless_stream_of_others(stream: int) -> None:
    scheduler = make_scheduler()
    long = add(scheduler, "long", LONG)
    steps = earlier_tokens = 0

    while "long" not in run_step(scheduler)[1]:
        steps += 1
        for index in range(8):  # more requests than one step can run
            if len(scheduler.waiting.queue) < 500:
                other = add(scheduler, f"{steps} {index}", stream, max_tokens=1)
                earlier_tokens += stream if other.order < long.order else 0

    # After all requests with earlier deadlines have run, the long request gets at least ``SHARE``
    # tokens in each step.
    assert steps <= earlier_tokens // STEP_TOKENS + LONG // SHARE + 8


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 5, 16, 17, 60, 300])),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 1000),
)
def test_no_prompt_waits_for_prompts_that_arrive_after_its_deadline(
    arrivals, dp, rows, seed
) -> None:
    scheduler, chance = make_scheduler(dp=dp, max_num_seqs=rows), random.Random(seed)
    arrivals = sorted(arrivals)
    begun: set[str] = set()
    deadlines: dict[str, int] = {}
    came: dict[str, int] = {}
    for step in range(5000):
        for index, (at, num_tokens) in enumerate(arrivals):
            if at == step:
                request = add(scheduler, str(index), num_tokens, chance.randint(1, 20))
                deadlines[str(index)], came[str(index)] = request.deadline, scheduler.step
        waiting = {request.request_id for request in scheduler.waiting.queue}
        if not scheduler.has_work:
            if step > 12:
                break
            continue
        run_step(scheduler)
        started = waiting - {request.request_id for request in scheduler.waiting.queue}
        left = waiting - started
        begun |= started
        for name in started:
            passed = [other for other in left if deadlines[other] < came[name]]
            assert not passed, "a request that came after their deadline went first"

    assert len(begun) == len(arrivals)
