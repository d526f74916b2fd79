"""With ``profile``, a runner can measure replays and eager steps that are in flight together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.plans import make_plan
from tests.unit.scheduler.requests import submit

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"


@pytest.mark.parametrize("k", [0, 2])
def test_a_replay_behind_an_eager_step_is_measured(npu: Any, k: int) -> None:
    plan = make_plan(k + 1, 2 * (k + 1), query_len=k + 1, max_num_seqs=2)
    settings = {"dtype": "float32", "profile": True, "scheduler": {"max_num_seqs": 2}}
    runner = make_runner(npu, DEMO, 2, plan.capture_order, k, settings)
    for graph in plan.capture_order:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
        [BlockPool(16, BLOCK_SIZE)],
        GraphDispatcher(plan),
        max_model_len=MAX_LEN,
        num_drafts=k,
    )
    scheduler.add(submit("a", (1, 2, 3), SamplingParams(max_tokens=6, temperature=0.0)))
    tokens = []
    while scheduler.has_work:
        tokens += [token for delta in turn(scheduler, runner) for token in delta.tokens]
    assert len(tokens) == 6
