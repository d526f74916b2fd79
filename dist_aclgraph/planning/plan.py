"""GraphPlan: the immutable, versioned set of buckets that a group agreed on.

Also what becomes of a plan when a capture fails: a decision value, for the controller to carry out.
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
    """What every rank captures, and in which order. Never changed: a new version replaces it."""

    version: int
    mode: GraphMode
    families: tuple[GraphFamily, ...] = ()  # empty where nothing is captured
    max_num_seqs: int = 0  # requests that run at once
    budget_model: BudgetModelName
    reasons: tuple[str, ...] = ()  # why the buckets are what they are, oldest first

    @property
    def capture_order(self) -> tuple[BatchDescriptor, ...]:
        """All graphs, largest first: smaller ones then fit in the pool that the largest grew."""
        found = [
            family.describe(bucket, self.max_num_seqs)
            for family in self.families
            for bucket in family.buckets
        ]
        return tuple(sorted(found, key=lambda d: (-d.num_tokens, d.mode != "PIECEWISE")))

    @property
    def num_graphs(self) -> int:
        """Buckets of all families."""
        return sum(len(family.buckets) for family in self.families)

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all fields: equal on all ranks that hold the same plan."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def without(self, failure: CaptureFailure) -> GraphPlan:
        """Return the next version, without a graph that could not be captured while serving."""
        families = [f.keep(failure.graph) if f.has(failure.graph) else f for f in self.families]
        reason = f"capture of {failure.graph} failed on rank {failure.rank} ({failure.cause})"
        return msgspec.structs.replace(
            self,
            version=self.version + 1,
            families=tuple(family for family in families if family.buckets),
            reasons=(*self.reasons, reason),
        )

    def shrink(self, failed: BatchDescriptor, cause: FailureCause, rank: int) -> GraphPlan:
        """Return the next version, with fewer graphs: what the ranks proved they can afford.

        An operator that fails speaks against its own graph alone. Where streams or memory ran out,
        the failed graph's family keeps as many buckets as it had captured, both ends among them
        where possible. If it had captured none yet, another family took all and gives one up.

        Raises:
            GraphError: the graph is not part of the plan.
            StreamBudgetError: no graph is left.
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
    """Return a plan as plain values."""
    return {
        "version": plan.version,
        "hash": plan.hash,
        "mode": plan.mode,
        "families": {family.name: list(family.buckets) for family in plan.families},
        "budget_model": plan.budget_model,
        "reasons": list(plan.reasons),
    }


class CaptureCost(msgspec.Struct, frozen=True):
    """What the capture of one bucket took on one rank; bytes are those that the pool grew by.

    Streams are 0 where the device's count does not follow graphs. ``digest`` names the sequence of
    operators that was captured. ``ai_cpu``: how often each operator is among them that the device's
    AI CPU runs, slower by far than its cores; None where the device does not tell.
    """

    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0
    digest: str = ""
    ai_cpu: dict[str, int] | None = None

    def ai_cpu_warning(self, graph: BatchDescriptor) -> str:
        """Return a sentence about what the AI CPU runs of ``graph``; empty where nothing."""
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
        """What became of it, as a sentence for reports."""
        return (
            f"{self.graph} was undone on all ranks: rank {self.rank} failed ({self.cause}): "
            f"{self.message}"
        )


class Shrink(msgspec.Struct, frozen=True):
    """Roll back, release what the new plan lacks, and go on with the new plan."""

    plan: GraphPlan


class GiveUp(msgspec.Struct, frozen=True):
    """Capture nothing more: the epoch ends, or serving goes on without graphs."""

    reason: str


CaptureDecision = Shrink | GiveUp


def decide_after_failure(plan: GraphPlan, failure: CaptureFailure) -> CaptureDecision:
    """Return what to do about a failed capture; the same on whatever rank it is asked."""
    failed = failure.graph
    if failure.cause == "timeout":
        # A rank that stopped answering may hold its peers inside a collective.
        return GiveUp(
            f"rank {failure.rank} did not answer while capturing {failed}"
            + (f": {failure.message}" if failure.message else "")
        )
    try:
        return Shrink(plan.shrink(failed, failure.cause, failure.rank))
    except StreamBudgetError as e:
        return GiveUp(f"{e}{f' ({failure.message})' if failure.message else ''}")
