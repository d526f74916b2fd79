"""The commands and the answers of the transaction that changes a group's graphs.

The messages are plain MessagePack, like steps. Before serving, commands are sent as actor calls;
while serving, the same commands are sent between steps.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dist_aclgraph.errors import FailureCause
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan

GraphAction = Literal["adopt", "prepare", "capture", "commit", "release"]


class GraphCommand(msgspec.Struct, frozen=True, tag="graph"):
    """One command, which every rank executes.

    Attributes:
        number: number of the command in its epoch; the answers repeat it.
        action: ``adopt``: use a plan; ``prepare``: run a graph's work eagerly once; ``capture``:
            capture the graph; ``commit``: allow replays of the graph; ``release``: release the
            graph, committed or not.
        graph: the graph of the action; None for ``adopt``.
        plan: the new plan for ``adopt``; None for all other actions.
    """

    epoch: int
    number: int
    action: GraphAction
    graph: BatchDescriptor | None = None
    plan: GraphPlan | None = None

    def __str__(self) -> str:
        if self.plan is not None:
            return f"adopt plan {self.plan.version}"
        return f"{self.action} {self.graph}"


class GraphAnswer(msgspec.Struct, frozen=True, tag="graph_answer"):
    """A rank's answer; ``failure`` is None if the rank has executed the command.

    Attributes:
        plan_hash: hash of the plan that the rank uses.
        free_streams: number of free streams of the device; None if captures do not change it.
        live_bytes: number of used bytes of the graph pool.
        pool_bytes: number of all bytes of the graph pool.
    """

    epoch: int
    number: int
    rank: int
    failure: FailureCause | None = None
    message: str = ""
    plan_hash: str = ""
    cost: CaptureCost = CaptureCost()
    free_streams: int | None = None
    live_bytes: int = 0
    pool_bytes: int = 0
