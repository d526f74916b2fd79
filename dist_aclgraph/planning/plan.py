"""GraphPlan: the set of buckets that all ranks of a group capture. A plan is immutable and has a
version.

This module also makes the decision after a failed capture; the controller executes the decision.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from dist_aclgraph.config import BudgetModelName, GraphMode
from dist_aclgraph.errors import (
    FailureCause,
    GraphError,
    StreamBudgetError,
)
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.descriptor import BatchDescriptor


class GraphPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs that every rank captures, and their order. A plan is immutable: a change makes a
    new plan with the next version.
    """

    version: int
    mode: GraphMode
    families: tuple[GraphFamily, ...] = ()  # empty if no graph is captured
    max_num_seqs: int = 0  # maximum number of requests that run at the same time
    budget_model: BudgetModelName
    reasons: tuple[str, ...] = ()  # reasons for the choice of buckets, the oldest first

    @property
    def capture_order(self) -> tuple[BatchDescriptor, ...]:
        """All graphs, largest first, so that later graphs fit in the pool of the first graph."""
        found = [
            family.describe(bucket, self.max_num_seqs)
            for family in self.families
            for bucket in family.buckets
        ]
        return tuple(sorted(found, key=lambda d: (-d.num_tokens, d.mode != "PIECEWISE")))

    @property
    def num_graphs(self) -> int:
        """Number of buckets of all families."""
        return sum(len(family.buckets) for family in self.families)

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all fields. Ranks with the same plan have the same hash."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def without(self, failure: CaptureFailure) -> GraphPlan:
        """Return the plan's next version, without the graph whose capture has failed. This method
        is for groups that already serve.
        """
        families = [f.keep(failure.graph) if f.has(failure.graph) else f for f in self.families]
        reason = f"capture of {failure.graph} failed on rank {failure.rank} ({failure.cause})"
        return msgspec.structs.replace(
            self,
            version=self.version + 1,
            families=tuple(family for family in families if family.buckets),
            reasons=(*self.reasons, reason),
        )

    def shrink(self, failed: BatchDescriptor, cause: FailureCause, rank: int) -> GraphPlan:
        """Return the plan's next version, which has fewer graphs because a capture has failed.

        If an operator failed, only the graph that contains it is removed. If streams or memory ran
        out, the failed graph's family keeps the number of buckets that were captured for this
        family before the failure. The family keeps its smallest and its largest size, if possible.
        If no bucket of this family was captured, other families have used the resources. Then the
        family with the most captured buckets loses one bucket.

        Raises:
            GraphError: the graph is not part of the plan.
            StreamBudgetError: the new plan would have no graph.
        """
        order = self.capture_order
        if failed not in order:
            raise GraphError(f"{failed} is not part of plan {self.version}")
        captured = order[: order.index(failed)]
        counts = [sum(map(family.has, captured)) for family in self.families]
        own = next(i for i, family in enumerate(self.families) if family.has(failed))
        families = list(self.families)
        if cause == "operator" or not captured:
            families[own] = families[own].keep(failed)
        elif counts[own]:
            families[own] = families[own].keep(failed, counts[own])
        else:
            other = max(range(len(counts)), key=counts.__getitem__)
            if counts[other] > 1:
                families[other] = families[other].keep(None, counts[other] - 1)
            else:
                families[own] = families[own].keep(failed)
        families = [family for family in families if family.buckets]
        reason = f"capture of {failed} failed on rank {rank} ({cause})"
        if not families:
            raise StreamBudgetError(
                f"{reason}, and no other bucket is left in plan {self.version}; free streams or "
                "memory on that rank, or set graph.mode to NONE"
            )
        left = sum(len(family.buckets) for family in families)
        kept = f"{reason}: {left} of {self.num_graphs} buckets stay"
        return msgspec.structs.replace(
            self, version=self.version + 1, families=tuple(families), reasons=(*self.reasons, kept)
        )


def plan_report(plan: GraphPlan) -> dict[str, Any]:
    """Return a plan as numbers, texts, lists and dictionaries, for reports."""
    return {
        "version": plan.version,
        "hash": plan.hash,
        "mode": plan.mode,
        "families": {family.name: list(family.buckets) for family in plan.families},
        "budget_model": plan.budget_model,
        "reasons": list(plan.reasons),
    }


class CaptureCost(msgspec.Struct, frozen=True):
    """The cost of capturing one bucket on one rank.

    ``streams`` is 0 if captures do not change the number of free streams that the device reports.
    ``bytes`` is the growth of the graph pool. ``digest`` identifies the sequence of captured
    operators. ``ai_cpu`` contains, for each operator, how many captured tasks run on the device's
    AI CPU, which is much slower than the device's cores. ``ai_cpu`` is None if the device does not
    report these tasks.
    """

    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0
    digest: str = ""
    ai_cpu: dict[str, int] | None = None

    def ai_cpu_warning(self, graph: BatchDescriptor) -> str:
        """Return a sentence about the operators of ``graph`` that run on the AI CPU; "" if there
        are none.
        """
        if not self.ai_cpu:
            return ""
        names = ", ".join(f"{name} ({count})" for name, count in sorted(self.ai_cpu.items()))
        return f"the graph {graph} holds operators that the AI CPU runs, slowly: {names}"


class CaptureFailure(msgspec.Struct, frozen=True):
    """One rank's report that it could not capture a graph."""

    graph: BatchDescriptor
    rank: int
    cause: FailureCause
    message: str = ""

    @property
    def undone(self) -> str:
        """A sentence for reports: it says that all ranks have undone the graph's capture, and names
        the cause.
        """
        return (
            f"{self.graph} was undone on all ranks: rank {self.rank} failed ({self.cause}): "
            f"{self.message}"
        )


class Shrink(msgspec.Struct, frozen=True):
    """The decision to undo the capture, release all graphs that are not in ``plan``, and continue
    with ``plan``.
    """

    plan: GraphPlan


class GiveUp(msgspec.Struct, frozen=True):
    """The decision to capture no more graphs.

    If the group does not serve yet, its epoch ends. A serving group continues to serve.
    """

    reason: str


CaptureDecision = Shrink | GiveUp


def decide_after_failure(plan: GraphPlan, failure: CaptureFailure) -> CaptureDecision:
    """Return the decision after a failed capture. All ranks follow the same decision."""
    failed = failure.graph
    if failure.cause == "timeout":
        # a rank that does not answer can block its peers inside a collective
        return GiveUp(
            f"rank {failure.rank} did not answer while capturing {failed}"
            + (f": {failure.message}" if failure.message else "")
        )
    try:
        return Shrink(plan.shrink(failed, failure.cause, failure.rank))
    except StreamBudgetError as e:
        return GiveUp(f"{e}{f' ({failure.message})' if failure.message else ''}")
