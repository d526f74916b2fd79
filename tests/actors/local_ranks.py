"""The ranks of a group are objects of this process. They use a device, but neither Ray nor HCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan

MAX_LEN = 128


@dataclass
class LocalRanks:
    """Workers that use the same device one after the other. Each worker is the only rank of its
    group.
    """

    workers: list[Worker]

    def __post_init__(self) -> None:
        self.ranks = tuple(range(len(self.workers)))

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        command = GraphCommand(0, 0, action, graph, plan)
        answers = [worker.carry_out(command) for worker in self.workers]
        # All ranks share one device. Its free streams are counted after the last rank's command.
        left = answers[-1].free_streams
        return [msgspec.structs.replace(answer, free_streams=left) for answer in answers]


def make_local_config(checkpoint: Path, **emulator: Any) -> Config:
    return make_config(
        {
            "model": str(checkpoint),
            "dtype": "float32",
            "scheduler": {"max_num_seqs": 12, "max_num_batched_tokens": 64},
            "graph": {"reserve_streams": 0},
            "device": {"kind": "emulated", "emulator": {"strict": False, **emulator}},
        }
    )


def start_rank(config: Config, rank: int, graphs: Sequence[BatchDescriptor]) -> Worker:
    """Return a worker that can capture ``graphs``."""
    worker = Worker(config, epoch=1)
    worker.join(rank, 0, "")
    worker.load()
    worker.make_runner(2, MAX_LEN, list(graphs))
    return worker
