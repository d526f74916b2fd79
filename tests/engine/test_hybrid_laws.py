"""Laws of models with recurrent state: neither graphs, drafts, shared prefixes nor preemptions
change a token, whatever the order of requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.checkpoints import make_prompts
from tests.engine.runners import FLOAT32, make_runner
from tests.engine.test_modes_law import EAGER, MAX_SEQS, Arrival, run
from tests.laws import examples
from tests.plans import make_plan

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
    """Compare the tokens up to the end of the shorter list, because requests are aborted."""
    for index, tokens in found.items():
        assert tokens == expected[index][: len(tokens)], name


@pytest.fixture(scope="module")
def runners(npu: Any, hybrid: Path, eager: ModelRunner) -> Runners:
    captured = {mode: (capture(npu, hybrid, plan, 0), plan) for mode, plan in PLANS.items()}
    return {"NONE": (eager, EAGER), **captured}


@examples(30)
@given(arrivals, st.integers(12, 40), st.integers(0, 6), st.integers(1, 2))
def test_every_mode_gives_the_tokens_of_requests_alone(
    runners: Runners,
    eager: ModelRunner,
    arrivals: list[Arrival],
    num_blocks: int,
    num_checkpoints: int,
    interval: int,
) -> None:
    expected = cold(eager, arrivals)

    for mode, (runner, plan) in runners.items():
        kept = Checkpoints(num_checkpoints, interval)
        found, scheduler = run(runner, plan, arrivals, num_blocks, checkpoints=kept)

        assert_equal(found, expected, mode)
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)


@pytest.fixture(scope="module", params=[1, 3])
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
    """``right`` has the number of right drafts of the requests in each step, again and again."""
    expected = cold(eager, arrivals)
    k, runners = drafting
    for name, (runner, plan) in runners.items():
        turns = 0

        def propose(scheduler: Scheduler, runner: ModelRunner = runner) -> None:
            nonlocal turns
            turns += 1
            for request in scheduler.running:
                set_drafts(runner, scheduler, request, expected, min(k, right[turns % len(right)]))

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
    """Replace the drafts of a request: first right tokens, then wrong tokens."""
    rows = scheduler.ranks[0].rows
    rows.settle(rows.index_of(request))
    done = len(request.tokens) - request.num_prompt_tokens
    coming = expected[request.request_id][done:]
    drafts = runner._drafts.drafts  # type: ignore[union-attr]
    for place in range(drafts.shape[1]):
        token = coming[place] if place < min(num_right, len(coming)) else 502
        drafts[request.row, place] = token
