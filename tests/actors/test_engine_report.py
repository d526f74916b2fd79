"""A group's engine reports its ranks' numbers for /metrics."""

from __future__ import annotations

from dist_aclgraph.actors.engine.engine_report import LoopCounts, group_metrics
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.plans import make_plan


def make_rank(rank):
    return {
        "rank": rank,
        "host": f"node-{rank}",
        "npu_ids": [rank % 2],
        "offered_bytes": 1000 + rank,
        "streams": {"offered": 1800 + rank, "taken": 5, "predicted": 30, "measured": 28},
    }


def test_all_that_is_by_rank_has_the_names_of_world_ranks():
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        [BlockPool(33, 16)],
        GraphDispatcher(make_plan(1, 4)),
        max_model_len=256,
    )
    scheduler.expert_tokens |= {0: 7, 1: 9}  # the keys are ranks in the group

    found = group_metrics(
        scheduler,
        LoopCounts(0, 0, 0, {}),
        {},
        {"emulated": True, "ranks": [make_rank(2), make_rank(3)]},
    )

    assert found["expert_tokens"] == {"2": 7, "3": 9}
    assert found["streams_offered"] == {"2": 1802, "3": 1803}
    assert found["memory_offered_bytes"] == {"2": 1002, "3": 1003}
    assert found["ranks"]["3"] == {"node": "node-3", "npus": "1", "kind": "emulated"}
