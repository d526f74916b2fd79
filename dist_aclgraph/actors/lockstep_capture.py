"""Capturing a plan in lockstep: bucket by bucket, largest first, all ranks or none.

A bucket that fails on one rank is released on all of them, and the plan shrinks to what the ranks
have proved they can afford; every rank confirms the new plan before capture goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dist_aclgraph.actors.worker import CaptureOutcome
from dist_aclgraph.errors import CaptureError, RankDisagreementError
from dist_aclgraph.graph.ledger import Ledger, bucket_term
from dist_aclgraph.graph.plan import (
    CaptureCost,
    CaptureFailure,
    GiveUp,
    GraphPlan,
    decide_after_failure,
)


class Ranks(Protocol):
    """All ranks of one lockstep group, as far as capture needs them."""

    ranks: tuple[int, ...]

    def call(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        arguments: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> list[Any]: ...


def same(*arguments: Any) -> Callable[[int], tuple[Any, ...]]:
    """Arguments of a call that are the same for every rank."""
    return lambda _: arguments


OnBucket = Callable[[int, int, int], None]  # buckets done, buckets in all, the bucket under way


@dataclass
class CaptureRecord:
    """What capture led to.

    Attributes:
        plan: the plan that holds now.
        costs: by bucket, the most that any rank paid.
        rollbacks: sentences about what was undone.
    """

    plan: GraphPlan
    costs: dict[int, CaptureCost] = field(default_factory=dict)
    rollbacks: list[str] = field(default_factory=list)


def confirm(group: Ranks, plan: GraphPlan, timeout_s: float) -> None:
    """Have every rank adopt ``plan`` and prove it by its hash.

    Raises:
        RankDisagreementError: a rank holds another plan.
    """
    hashes = group.call("confirm", "NEGOTIATING", timeout_s, same(plan))
    for rank, found in zip(group.ranks, hashes, strict=True):
        if found != plan.hash:
            raise RankDisagreementError(
                f"holds plan {found[:12]} instead of {plan.hash[:12]} (version {plan.version})",
                rank,
                "NEGOTIATING",
            )


def capture_plan(
    group: Ranks,
    plan: GraphPlan,
    ledgers: list[Ledger],
    *,
    confirm_timeout_s: float,
    capture_timeout_s: float,
    on_bucket: OnBucket,
) -> CaptureRecord:
    """Capture all buckets of ``plan``, or of what it shrinks to.

    Args:
        ledgers: one per rank; what each bucket took is entered.

    Raises:
        CaptureError: no bucket can be captured, or an operator fails for another reason than size;
            names rank, bucket and remedy.
        WorkerError: a rank died, hung or disagreed.
    """
    confirm(group, plan, confirm_timeout_s)
    record = CaptureRecord(plan)
    captured: set[int] = set()
    while left := [b for b in record.plan.capture_order if b not in captured]:
        bucket = left[0]
        on_bucket(len(captured), len(record.plan.buckets), bucket)
        outcomes = _capture_bucket(group, record.plan, bucket, capture_timeout_s)
        failed = next((o for o in outcomes if o.failure is not None), None)
        if failed is None:
            captured.add(bucket)
            record.costs[bucket] = CaptureCost(
                streams=max(outcome.cost.streams for outcome in outcomes),
                bytes=max(outcome.cost.bytes for outcome in outcomes),
                seconds=max(outcome.cost.seconds for outcome in outcomes),
            )
            for ledger, outcome in zip(ledgers, outcomes, strict=True):
                ledger.measure(bucket_term(bucket), outcome.cost.streams)
            continue
        release(group, {bucket}, capture_timeout_s)
        record.plan = _shrink(record, bucket, failed)
        surplus = captured - set(record.plan.buckets)
        release(group, surplus, capture_timeout_s)
        captured -= surplus
        confirm(group, record.plan, confirm_timeout_s)
    on_bucket(len(captured), len(record.plan.buckets), 0)
    return record


def _capture_bucket(
    group: Ranks, plan: GraphPlan, bucket: int, timeout_s: float
) -> list[CaptureOutcome]:
    warm_ups: list[CaptureOutcome] = group.call("warm_up", "CAPTURING", timeout_s, same(bucket))
    if any(outcome.failure is not None for outcome in warm_ups):
        return warm_ups
    return group.call("capture", "CAPTURING", timeout_s, same(bucket, plan.hash))


def release(group: Ranks, buckets: Iterable[int], timeout_s: float) -> None:
    """Undo the capture of ``buckets`` on all ranks."""
    for bucket in sorted(buckets):
        group.call("release", "CAPTURING", timeout_s, same(bucket))


def _shrink(record: CaptureRecord, bucket: int, failed: CaptureOutcome) -> GraphPlan:
    assert failed.failure is not None
    failure = CaptureFailure(bucket, failed.rank, failed.failure, failed.message)
    decision = decide_after_failure(record.plan, failure)
    if isinstance(decision, GiveUp):
        raise CaptureError(f"capture of bucket {bucket}: {decision.reason}")
    record.rollbacks.append(
        f"bucket {bucket} was rolled back on all ranks: rank {failed.rank} failed "
        f"({failed.failure}): {failed.message}"
    )
    return decision.plan
