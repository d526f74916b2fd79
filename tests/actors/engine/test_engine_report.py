"""A group's engine reports the values of its ranks that ``/metrics`` shows."""

from __future__ import annotations

import os
import socket

from dist_aclgraph.actors.engine.engine_report import LoopCounts, group_metrics, host_metrics
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.plans import make_plan


def make_rank(rank):
    return {
        "rank": rank,
        "host": f"node-{rank}",
        "pid": 1,
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
    scheduler.expert_tokens |= {0: 7, 1: 9}  # the keys are indices of ranks within the group

    found = group_metrics(
        scheduler,
        LoopCounts(0, 0, 0, {}, {}, {}),
        {},
        {"emulated": True, "ranks": [make_rank(2), make_rank(3)]},
    )

    assert found["expert_tokens"] == {"2": 7, "3": 9}
    assert found["streams_offered"] == {"2": 1802, "3": 1803}
    assert found["memory_offered_bytes"] == {"2": 1002, "3": 1003}
    assert found["ranks"]["3"] == {"node": "node-3", "npus": "1", "kind": "emulated"}


def test_memory_is_that_of_processes_on_this_host():
    here = {**make_rank(2), "host": socket.gethostname(), "pid": os.getpid()}
    ended = {**here, "rank": 3, "pid": 1 << 30}

    found = host_metrics({"ranks": [here, ended, make_rank(4)]})

    memory = found["process_resident_memory_bytes"]
    assert memory.keys() == {"engine", "worker-2"}
    assert 1 << 20 < memory["worker-2"] < 1 << 40
    assert found["process_open_fds"]["engine"] >= len(os.listdir("/proc/self/fd")) - 1
    [total], [available] = (found[f"host_memory{x}_bytes"].values() for x in ("", "_available"))
    assert 0 < available < total
