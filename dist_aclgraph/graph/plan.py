"""GraphPlan: the immutable, versioned set of buckets that a group agreed on.

Also what becomes of a plan when a capture fails: a decision value, for the controller to carry out.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from dist_aclgraph.config import BudgetModelName, GraphMode
from dist_aclgraph.errors import (
    GraphError,
    StreamBudgetError,
)
from dist_aclgraph.graph.budget import trim_sizes

CaptureCause = Literal["streams", "memory", "operator", "timeout"]


class GraphPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank captures, and in which order. Never changed: a new version replaces it."""

    version: int
    mode: GraphMode
    buckets: tuple[int, ...]  # ascending, in tokens; empty where nothing is captured
    query_len: int = 1  # uniform query length of the decode graphs
    max_num_seqs: int = 0  # requests that run at once
    budget_model: BudgetModelName
    reasons: tuple[str, ...] = ()  # why the buckets are what they are, oldest first

    @property
    def capture_order(self) -> tuple[int, ...]:
        """Buckets, largest first: smaller graphs then fit in the pool that the largest grew."""
        return self.buckets[::-1]

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all fields: equal on all ranks that hold the same plan."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def shrink(self, failed_bucket: int, cause: CaptureCause, rank: int) -> GraphPlan:
        """Return the next version, without the failed bucket and what else cannot be afforded.

        Streams and memory: the ranks could afford as many buckets as they had captured before the
        failure, so that many stay, both ends among them where possible. An operator that fails
        speaks against its own bucket alone.

        Raises:
            GraphError: the bucket is not part of the plan.
            StreamBudgetError: no bucket is left.
        """
        if failed_bucket not in self.buckets:
            raise GraphError(
                f"bucket {failed_bucket} is not part of plan {self.version}: {self.buckets}"
            )
        left = [bucket for bucket in self.buckets if bucket != failed_bucket]
        captured = sum(bucket > failed_bucket for bucket in self.buckets)
        if cause in ("streams", "memory") and captured:
            left = trim_sizes(left, captured)
        reason = f"capture of {failed_bucket} failed on rank {rank} ({cause})"
        if not left:
            raise StreamBudgetError(
                f"{reason}, and no other bucket is left in plan {self.version}; free streams or "
                "memory on that rank, or set graph.mode to NONE"
            )
        kept = f"{reason}: {len(left)} of {len(self.buckets)} buckets stay"
        return msgspec.structs.replace(
            self, version=self.version + 1, buckets=tuple(left), reasons=(*self.reasons, kept)
        )


class CaptureCost(msgspec.Struct, frozen=True):
    """What the capture of one bucket took on one rank; bytes are those that the pool grew by."""

    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CaptureFailure(msgspec.Struct, frozen=True):
    """One rank's report that it could not capture a bucket."""

    bucket: int
    rank: int
    cause: CaptureCause
    message: str = ""


class Shrink(msgspec.Struct, frozen=True):
    """Roll back, release what the new plan lacks, and go on with the new plan."""

    plan: GraphPlan


class GiveUp(msgspec.Struct, frozen=True):
    """Capture nothing more: the epoch ends, or serving goes on without graphs."""

    reason: str


CaptureDecision = Shrink | GiveUp


def decide_after_failure(plan: GraphPlan, failure: CaptureFailure) -> CaptureDecision:
    """Return what to do about a failed capture; the same on whatever rank it is asked."""
    if failure.cause == "timeout":
        # A rank that stopped answering may hold its peers inside a collective.
        return GiveUp(
            f"rank {failure.rank} did not answer while capturing {failure.bucket}"
            + (f": {failure.message}" if failure.message else "")
        )
    try:
        return Shrink(plan.shrink(failure.bucket, failure.cause, failure.rank))
    except StreamBudgetError as e:
        return GiveUp(f"{e}{f' ({failure.message})' if failure.message else ''}")
