"""The commands and the answers of the transaction that changes a group's graphs.

The messages are plain MessagePack, like the messages of steps. Before the group serves, commands
are sent as actor calls. While the group serves, the same commands are sent between steps.
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
        number: sequence number of the command in its epoch. The answers contain the same number.
        action: the work of the ranks. ``adopt``: use the plan; ``prepare``: run the graph's work
            eagerly once; ``capture``: capture the graph; ``commit``: allow steps to replay the
            graph; ``release``: release the graph, committed or not.
        graph: the graph to which the action applies; None for ``adopt``.
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
        free_streams: number of free streams that the device reports; None if captures do not change
            this number.
        live_bytes: number of bytes of the graph pool that tensors occupy.
        pool_bytes: size of the graph pool in bytes.
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
