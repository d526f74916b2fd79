"""The moves of the transaction that changes a group's graphs, and the answers of ranks.

They are plain MessagePack, like steps. The same moves travel as actor calls before serving, and
between steps while serving.
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
            ``commit``: it may be replayed afterwards; ``release`` it, committed or not.
        graph: set for all actions except ``adopt``.
        plan: set for ``adopt``.
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
    """A rank's vote: ``failure`` is None if it has executed the command.

    Attributes:
        plan_hash: hash of the rank's plan.
        cost: cost of a capture.
        free_streams: free streams of the device; None if its count does not follow graphs.
        live_bytes: used bytes of the graph pool.
        pool_bytes: all bytes of the graph pool.
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
