"""The moves of the transaction that changes a group's graphs, and what a rank answers to each.

Plain MessagePack, as steps are: the same moves travel as calls before serving, and between steps
while serving.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dist_aclgraph.errors import FailureCause
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan

GraphAction = Literal["adopt", "prepare", "capture", "commit", "release"]


class GraphCommand(msgspec.Struct, frozen=True, tag="graph"):
    """One move, carried out by every rank.

    Attributes:
        number: counts the commands of an epoch; the answers repeat it.
        action: ``adopt`` a plan; ``prepare``: run a graph's work eagerly once; ``capture`` it;
            ``commit``: it may be replayed from now on; ``release`` it, committed or not.
        graph: of all actions but ``adopt``.
        plan: of ``adopt``.
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
    """A rank's vote: ``failure`` is None where it has carried the command out.

    Attributes:
        plan_hash: of the plan that the rank holds.
        cost: of a capture.
        free_streams: that the device can still give; None where its count does not follow graphs.
        live_bytes: of the graph pool, that something holds.
        pool_bytes: of the graph pool, in all.
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
