"""One set of buckets that every rank can afford, chosen by a pure function from all offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.graph.budget import BudgetModel, StreamOffer, Workload, trim_sizes
from dist_aclgraph.graph.plan import GraphPlan

__all__ = ["StreamOffer", "negotiate"]


def negotiate(
    offers: Sequence[StreamOffer],
    candidate_sizes: Sequence[int],
    budget_model: BudgetModel,
    workload: Workload,
    *,
    version: int = 1,
    max_num_seqs: int = 0,
) -> GraphPlan:
    """Choose the buckets that every rank can capture.

    The plan is the same on all ranks, because a collective inside a graph must be replayed by all
    members, and the same for any order of the offers. It never holds more buckets than the budget
    model allows any rank; smallest and largest affordable size stay. Units: streams and bytes.

    Raises:
        GraphError: there are no offers or no sizes, or two offers come from one rank.
        StreamBudgetError: not even one bucket fits; lists offer and cost per rank.
    """
    offers = sorted(offers, key=lambda offer: offer.rank)
    sizes = sorted(set(candidate_sizes))
    if not offers or len({offer.rank for offer in offers}) < len(offers):
        raise GraphError(f"need one offer of each rank, got {[offer.rank for offer in offers]}")
    if not sizes and workload.mode != "NONE":
        raise GraphError("there are no candidate sizes to choose from")
    workload = replace(workload, num_candidates=len(sizes))

    def plan(buckets: Sequence[int], reasons: Sequence[str]) -> GraphPlan:
        return GraphPlan(
            version=version,
            mode=workload.mode,
            buckets=tuple(buckets),
            query_len=workload.query_len,
            max_num_seqs=max_num_seqs,
            budget_model=budget_model.name,
            reasons=tuple(reasons),
        )

    if workload.mode == "NONE":
        return plan((), ["graph.mode is NONE"])
    reasons = []
    fitting = _sizes_that_fit_memory(sizes, offers, workload)
    if len(fitting) < len(sizes):
        poorest = min(offers, key=lambda offer: offer.free_bytes)
        reasons.append(
            f"sizes above {fitting[-1]} need more than the {poorest.free_bytes} bytes "
            f"of rank {poorest.rank}"
        )
    limits = [budget_model.max_buckets(offer, workload) for offer in offers]
    if min(limits) < 1:
        raise StreamBudgetError(_shortfalls(offers, limits, budget_model, workload))
    limit = min(limits)
    tightest = offers[limits.index(limit)]
    buckets = trim_sizes(fitting, limit)
    if len(buckets) < len(fitting):
        reasons.append(
            f"rank {tightest.rank} affords {limit} of {len(fitting)} sizes by "
            f"{budget_model.name}, having {tightest.usable} streams for graphs"
        )
    else:
        reasons.append(
            f"all {len(fitting)} sizes fit; rank {tightest.rank} affords {limit}, the fewest"
        )
    return plan(buckets, reasons)


def _sizes_that_fit_memory(
    sizes: Sequence[int], offers: Sequence[StreamOffer], workload: Workload
) -> list[int]:
    poorest = min(offers, key=lambda offer: offer.free_bytes)
    fitting = [size for size in sizes if size * workload.bytes_per_token <= poorest.free_bytes]
    if not fitting:
        need = sizes[0] * workload.bytes_per_token
        raise StreamBudgetError(
            f"rank {poorest.rank} offers {poorest.free_bytes} bytes; the smallest bucket "
            f"({sizes[0]} tokens) costs {need}, {need - poorest.free_bytes} too many; lower "
            "kv.memory_fraction, or set graph.mode to NONE"
        )
    return fitting


def _shortfalls(
    offers: Sequence[StreamOffer],
    limits: Sequence[int],
    budget_model: BudgetModel,
    workload: Workload,
) -> str:
    lines = [
        f"rank {offer.rank} offers {offer.usable} streams ({offer.available} available, "
        f"{offer.reserve} in reserve), one bucket costs {budget_model.price(1, workload)}"
        for offer, limit in zip(offers, limits, strict=True)
        if limit < 1
    ]
    return (
        f"not even one bucket fits by {budget_model.name}: {'; '.join(lines)}; lower "
        "graph.reserve_streams, or set graph.mode to NONE"
    )
