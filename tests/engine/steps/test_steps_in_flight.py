"""Law: a request gets the same results with two steps in flight as with one step.

The tests compare tokens, log-probabilities and finish reasons in every graph mode. Requests arrive,
are aborted and are preempted. They have greedy or random sampling, penalties, stop tokens and
drafts. Graphs change while they run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, MAX_TOKENS, Arrival, arrivals
from tests.laws import examples
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
STOPS = tuple(range(0, 832, 9))  # many, so that some requests generate a stop token
SAMPLINGS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 3, "stop_token_ids": STOPS, "logprobs": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "stop_token_ids": STOPS, "min_tokens": 3},
]
# For each step, the indices of the graphs that are released, or captured again, just before the
# step.
Changes = dict[int, list[int]]
changes_of_graphs = st.dictionaries(
    st.integers(1, 30), st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6
)


class Got(NamedTuple):
    tokens: list[int]
    logprobs: list[tuple[bytes, int]]
    reasons: list[str | None]


def make_scheduler(dispatcher: GraphDispatcher, num_drafts: int, num_blocks: int = 40) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
        [BlockPool(num_blocks, BLOCK_SIZE)],
        dispatcher,
        max_model_len=MAX_LEN,
        num_drafts=num_drafts,
    )


def play(
    runner: ModelRunner,
    plan: GraphPlan,
    requests: list[Arrival],
    num_blocks: int,
    num_drafts: int,
    sampling: dict[str, Any] | Sequence[dict[str, Any]],
    changes: Changes,
    deaths: Collection[int] = (),
) -> dict[str, Got]:
    """Run all requests; return the tokens of each.

    Args:
        sampling: the parameters of all requests, or a list with the parameters of each request.
        deaths: numbers of steps. Just before each of these steps, the group is lost, and the next
            group gets the requests with their tokens.
    """
    dispatcher = GraphDispatcher(plan)
    scheduler = make_scheduler(dispatcher, num_drafts, num_blocks)
    got: dict[str, Got] = {}

    def add(index: int) -> None:
        request, output = requests[index], got[str(index)].tokens
        own = sampling if isinstance(sampling, dict) else sampling[index]
        settings = {"temperature": 0.0, **own}
        settings["min_tokens"] = min(settings.get("min_tokens", 0), request.max_tokens)
        params = SamplingParams(max_tokens=request.max_tokens, **settings)
        scheduler.add(submit(str(index), request.prompt, params, output=output))

    for step in range(2000):
        if step in deaths:
            while runner.is_busy:
                runner.finish()
            scheduler = make_scheduler(dispatcher, num_drafts, num_blocks)
            for name, one in got.items():
                abort_at = requests[int(name)].abort_at
                is_aborted = abort_at is not None and abort_at < step
                if not is_aborted and not any(one.reasons):
                    add(int(name))
        for index, request in enumerate(requests):
            if request.at_step == step:
                got[str(index)] = Got([], [], [])
                add(index)
            if request.abort_at == step:
                scheduler.abort(str(index))
        if step in changes:
            while runner.is_busy:  # an engine waits, too, before it changes graphs
                note(got, scheduler.update([runner.finish()]))
            for index in changes[step]:
                change(runner, dispatcher, index)
        note(got, turn(scheduler, runner))
        if step > 12 and not scheduler.has_work:
            break
    assert not runner.is_busy
    assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)
    restore(runner, dispatcher)
    return got


def note(got: dict[str, Got], deltas: StepOutputs) -> None:
    for delta in deltas:
        one = got[delta.request_id]
        one.tokens.extend(delta.tokens)
        one.reasons.append(delta.finish_reason)
        found = [report for report in delta.logprobs if report is not None]
        one.logprobs.extend((report.token_ids, report.rank) for report in found)


def change(runner: ModelRunner, dispatcher: GraphDispatcher, index: int) -> None:
    """Release the graph ``index`` of the plan; if it is already released, capture it again."""
    order = dispatcher.plan.capture_order
    if not order:
        return
    graph = order[index % len(order)]
    if graph in dispatcher.graphs:
        dispatcher.remove(graph)
        runner.release(graph)
    else:
        capture(runner, graph)
        dispatcher.add(graph)


def restore(runner: ModelRunner, dispatcher: GraphDispatcher) -> None:
    for graph in dispatcher.plan.capture_order:
        if graph not in dispatcher.graphs:
            capture(runner, graph)


def capture(runner: ModelRunner, graph: BatchDescriptor) -> None:
    runner.warm_up(graph)
    runner.capture(graph)
    runner.commit(graph)


@pytest.fixture(scope="module", params=[0, 2], ids=["alone", "drafts"])
def runners(npu: Any, request: pytest.FixtureRequest) -> Any:
    """For each graph mode, one runner with one step in flight and one with two steps in flight."""
    k = request.param
    q = k + 1
    decode = tuple(q * size for size in (1, 2, 4, MAX_SEQS))
    plans = {
        "NONE": EAGER,
        "FULL_AND_PIECEWISE": make_plan(*decode, mixed=(8, 48), query_len=q, max_num_seqs=MAX_SEQS),
    }
    found = {}
    for mode, plan in plans.items():
        pair = []
        for in_flight in (1, 2):
            scheduler = {"max_num_seqs": MAX_SEQS, "steps_in_flight": in_flight}
            settings = {"dtype": "float32", "scheduler": scheduler}
            runner = make_runner(npu, DEMO, MAX_SEQS, plan.capture_order, k, settings)
            for graph in plan.capture_order:
                capture(runner, graph)
            pair.append(runner)
        found[mode] = plan, pair
    return k, found


@examples(20)
@given(arrivals, st.integers(12, 40), st.sampled_from(SAMPLINGS), changes_of_graphs)
def test_two_steps_in_flight_give_the_results_of_one(
    runners: Any,
    arrivals: list[Arrival],
    num_blocks: int,
    sampling: dict[str, Any],
    changes: Changes,
) -> None:
    k, modes = runners

    for mode, (plan, pair) in modes.items():
        one, two = (
            play(runner, plan, arrivals, num_blocks, k, sampling, changes) for runner in pair
        )

        for index, arrival in enumerate(arrivals):
            ours, wanted = two[str(index)], one[str(index)]
            if arrival.abort_at is not None:  # the runs abort requests at different lengths
                length = min(len(ours.tokens), len(wanted.tokens))
                assert ours.tokens[:length] == wanted.tokens[:length], mode
                continue
            assert ours.tokens == wanted.tokens, mode
            assert ours.reasons[-1] == wanted.reasons[-1]
            assert ours.logprobs == wanted.logprobs, mode
