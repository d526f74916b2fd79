"""Law: whatever the scheduler decides, every graph mode gives the same tokens as eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph import planning
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.device import emulator
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.laws import examples
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

MAX_SEQS, MAX_TOKENS = 6, 48
EAGER = make_plan(mode="NONE")
PLANS = {
    "FULL_DECODE_ONLY": make_plan(1, 2, 4, 6, max_num_seqs=MAX_SEQS),
    "PIECEWISE": make_plan(4, 16, 40, mode="PIECEWISE", max_num_seqs=MAX_SEQS),
    "FULL": make_plan(4, 16, 48, mode="FULL", max_num_seqs=MAX_SEQS),
    "FULL_AND_PIECEWISE": make_plan(2, 5, mixed=(8, 48), max_num_seqs=MAX_SEQS),
}
NO_UPDATES = make_plan(1, 2, 4, 6, max_num_seqs=MAX_SEQS)


@dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    abort_at: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        prompt=st.lists(st.integers(0, 500), min_size=1, max_size=70).map(tuple),
        max_tokens=st.integers(1, 25),
        abort_at=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    ),
    min_size=1,
    max_size=9,
)


def make_runners(
    npu: Npu, checkpoint: Path, plans: dict[str, GraphPlan], **settings: Any
) -> dict[str, ModelRunner]:
    settings = {"dtype": "float32", **settings}
    found = {"NONE": make_runner(npu, checkpoint, MAX_SEQS, settings=settings)}
    for mode, plan in plans.items():
        graphs = plan.capture_order
        runner = found[mode] = make_runner(npu, checkpoint, MAX_SEQS, graphs, settings=settings)
        for graph in plan.capture_order:
            runner.warm_up(graph)
            runner.capture(graph)
            runner.commit(graph)
    return found


@pytest.fixture(scope="module")
def runners(npu: Any, checkpoint: Path) -> dict[str, ModelRunner]:
    return make_runners(npu, checkpoint, PLANS)


@pytest.fixture(scope="module")
def padded_runners(npu: Any, checkpoint: Path) -> Iterator[dict[str, ModelRunner]]:
    """Runners whose graphs have fixed lengths of keys: 32, 64 and 128 tokens. The lengths are never
    updated.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning.buckets, "SMALLEST_KV_SIZE", 32)
        graph = {"updates": "none"}
        yield make_runners(npu, checkpoint, {"NO_UPDATES": NO_UPDATES}, graph=graph)


@pytest.fixture(scope="module")
def latent_runners(npu: Any, deepseek: Path) -> dict[str, ModelRunner]:
    return make_runners(npu, deepseek, {mode: PLANS[mode] for mode in PLANS if mode != "FULL"})


@pytest.fixture(scope="module", params=["auto", "int8"])
def sparse_runners(
    npu: Any, sparse: Path, request: pytest.FixtureRequest
) -> dict[str, ModelRunner]:
    plans = {mode: PLANS[mode] for mode in ("FULL", "FULL_AND_PIECEWISE")}
    return make_runners(npu, sparse, plans, kv={"dtype": request.param, "block_size": BLOCK_SIZE})


def run(
    runner: ModelRunner,
    plan: GraphPlan,
    arrivals: list[Arrival],
    num_blocks: int,
    num_drafts: int = 0,
    seeds: Mapping[str, int] | None = None,
    checkpoints: Checkpoints | None = None,
    after_turn: Callable[[Scheduler], None] = lambda scheduler: None,
    **sampling: Any,
) -> tuple[dict[str, list[int]], Scheduler]:
    """Run the requests of ``arrivals`` with a scheduler and a runner; return each request's tokens.

    Args:
        checkpoints: the pool of checkpoints, if the model has recurrent states.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
        [BlockPool(num_blocks, BLOCK_SIZE, checkpoints=checkpoints)],
        GraphDispatcher(plan),
        max_model_len=MAX_LEN,
        num_drafts=num_drafts,
    )
    tokens: dict[str, list[int]] = {}
    last = max(a.at_step for a in arrivals)
    step = 0
    while step <= last or scheduler.has_work:
        for index, arrival in enumerate(arrivals):
            if arrival.at_step == step:
                settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
                if seeds is not None:
                    settings["seed"] = seeds[str(index)]
                params = SamplingParams(max_tokens=arrival.max_tokens, **settings)
                scheduler.add(submit(str(index), arrival.prompt, params))
                tokens[str(index)] = []
            if arrival.abort_at == step:
                scheduler.abort(str(index))
        for output in turn(scheduler, runner):
            tokens[output.request_id] += output.tokens
        after_turn(scheduler)
        step += 1
        assert step < 2000
    return tokens, scheduler


@examples(60)
@given(arrivals, st.integers(12, 40))
def test_every_mode_gives_the_tokens_of_eager_steps(
    runners: dict[str, ModelRunner], arrivals: list[Arrival], num_blocks: int
) -> None:
    expected, _ = run(runners["NONE"], EAGER, arrivals, num_blocks)

    for mode, plan in PLANS.items():
        tokens, scheduler = run(runners[mode], plan, arrivals, num_blocks)

        assert tokens == expected, mode
        if mode == "FULL":
            assert not scheduler.dispatcher.misses


@examples(25)
@given(arrivals, st.integers(12, 40))
def test_graphs_without_updates_give_the_tokens_of_eager_steps(
    padded_runners: dict[str, ModelRunner], arrivals: list[Arrival], num_blocks: int
) -> None:
    expected, _ = run(padded_runners["NONE"], EAGER, arrivals, num_blocks)
    before = emulator.counters()["task_updates"]

    tokens, _ = run(padded_runners["NO_UPDATES"], NO_UPDATES, arrivals, num_blocks)

    assert tokens == expected
    assert emulator.counters()["task_updates"] == before


@examples(25)
@given(arrivals, st.integers(12, 40))
def test_every_mode_of_latent_attention_gives_the_tokens_of_eager_steps(
    latent_runners: dict[str, ModelRunner], arrivals: list[Arrival], num_blocks: int
) -> None:
    expected, _ = run(latent_runners["NONE"], EAGER, arrivals, num_blocks)

    for mode in latent_runners.keys() - {"NONE"}:
        tokens, _ = run(latent_runners[mode], PLANS[mode], arrivals, num_blocks)

        assert tokens == expected, mode


@examples(25)
@given(arrivals, st.integers(12, 40))
def test_every_mode_of_sparse_attention_gives_the_tokens_of_eager_steps(
    sparse_runners: dict[str, ModelRunner], arrivals: list[Arrival], num_blocks: int
) -> None:
    expected, _ = run(sparse_runners["NONE"], EAGER, arrivals, num_blocks)

    for mode in sparse_runners.keys() - {"NONE"}:
        tokens, scheduler = run(sparse_runners[mode], PLANS[mode], arrivals, num_blocks)

        assert tokens == expected, mode
        if mode == "FULL":
            assert not scheduler.dispatcher.misses


@pytest.mark.parametrize("model", ["checkpoint", "sparse"])
def test_padding_that_is_longer_than_any_request_runs_no_graph(
    npu: Any, request: pytest.FixtureRequest, model: str
) -> None:
    # If all rows are in use, all padding tokens belong to one padding request, which is then too
    # long for the graph.
    plan = make_plan(MAX_LEN * 2, mode="FULL", max_num_seqs=MAX_SEQS)
    runners = make_runners(npu, request.getfixturevalue(model), {"FULL": plan})
    arrivals = [Arrival(0, tuple(range(7 * i, 7 * i + 5)), 2 + i, None) for i in range(MAX_SEQS)]
    expected, _ = run(runners["NONE"], EAGER, arrivals, 40)

    tokens, scheduler = run(runners["FULL"], plan, arrivals, 40)

    assert tokens == expected
    assert scheduler.dispatcher.misses["cache_full"] == 2
    assert scheduler.dispatcher.replays.total() == MAX_SEQS - 1


def test_a_small_cache_preempts_and_still_gives_the_same_tokens(
    runners: dict[str, ModelRunner],
) -> None:
    arrivals = [Arrival(i, tuple(range(70 * i, 70 * i + 58)), 25, None) for i in range(6)]
    expected, _ = run(runners["NONE"], EAGER, arrivals, 40)

    for mode, plan in PLANS.items():
        tokens, scheduler = run(runners[mode], plan, arrivals, 13)

        assert scheduler.num_preemptions > 0
        assert tokens == expected, mode
