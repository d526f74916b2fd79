"""Law: whatever the scheduler decides, drafts change no token, in eager steps and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.planning.plan import GraphPlan
from tests.engine.runners import make_runner
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, arrivals, run
from tests.laws import examples
from tests.plans import make_plan
from tests.slow import slow

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "logprobs": 2},
    {"min_tokens": 1, "logprobs": 1},
]
Runners = dict[str, tuple[ModelRunner, GraphPlan]]


def make_runners(npu: Any, directory: Path, k: int) -> Runners:
    """Return runners with k drafts. The first runner runs eager steps. If k > 0, the second runner
    has full graphs, and the third runner has full and piecewise graphs.
    """
    q = k + 1
    decode = tuple(q * size for size in (1, 2, 4, MAX_SEQS))
    plans = {"eager": EAGER}
    if k:
        plans["full"] = make_plan(*decode, query_len=q, max_num_seqs=MAX_SEQS)
        plans["both"] = make_plan(*decode, mixed=(16, 48), query_len=q, max_num_seqs=MAX_SEQS)
    found = {}
    for name, plan in plans.items():
        runner = make_runner(npu, directory, MAX_SEQS, plan.capture_order, num_drafts=k)
        for graph in plan.capture_order:
            runner.warm_up(graph)
            runner.capture(graph)
            runner.commit(graph)
        found[name] = runner, plan
    return found


@pytest.fixture(scope="module")
def without(npu: Any) -> Runners:
    return make_runners(npu, DEMO, 0)


@pytest.fixture(scope="module", params=[slow(1), 2, slow(3)])
def drafting(npu: Any, request: pytest.FixtureRequest) -> tuple[int, Runners]:
    return request.param, make_runners(npu, DEMO, request.param)


@examples(12)
@given(arrivals, st.integers(12, 40), st.sampled_from(SAMPLINGS))
def test_drafts_change_no_token(
    without: Runners,
    drafting: tuple[int, Runners],
    arrivals: list[Arrival],
    num_blocks: int,
    sampling: dict[str, Any],
) -> None:
    k, runners = drafting
    expected, _ = run(*without["eager"], arrivals, num_blocks, **sampling)

    for name, (runner, plan) in runners.items():
        found, scheduler = run(runner, plan, arrivals, num_blocks, k, **sampling)

        for index, arrival in enumerate(arrivals):
            tokens, wanted = found[str(index)], expected[str(index)]
            if arrival.abort_at is not None:  # may have more tokens in one run
                length = min(len(tokens), len(wanted))
                tokens, wanted = tokens[:length], wanted[:length]
            assert tokens == wanted, name
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)
