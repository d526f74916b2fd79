"""Computes prices from probes. A probe measures the cost of one bucket of a family on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.cann_pinned import CannPinnedBudget
from dist_aclgraph.planning.budget.model import BudgetTerm, Price
from dist_aclgraph.planning.budget.offer import StreamOffer


@dataclass(frozen=True)
class CalibratedBudget(CannPinnedBudget):
    """Computes the prices of buckets from a rank's probes: streams for each bucket, and bytes for
    each token.

    For a probe, the rank captures and releases the largest bucket of the family.
    ``CannPinnedBudget`` computes the price if the family has no probe, or if captures do not change
    the number of free streams that the device reports. In these cases, the field ``why`` of each
    part of the price names the reason. ``CannPinnedBudget`` is the most cautious interpretation of
    CANN's sources.
    """

    name: BudgetModelName = "calibrated"

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        probes = offer.probes_of(family)
        if probes and offer.counts_graphs:
            why = f"what {probes[0].graph} took on rank {offer.rank}"
            return (BudgetTerm("probed", probes[0].streams, why),)
        cause = "the device's count does not follow graphs" if probes else "not probed"
        guessed = super().price(family, offer)
        return tuple(
            replace(term, why=f"{term.why} ({cause}: {CannPinnedBudget.name})") for term in guessed
        )

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        if probes := offer.probes_of(family):
            return probes[0].bytes / probes[0].graph.num_tokens
        return super().bytes_per_token(family, offer)
