"""Prices from probes: what one bucket of each family took on this very rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.graph.buckets import GraphFamily
from dist_aclgraph.graph.budget.cann_pinned import CannPinnedBudget
from dist_aclgraph.graph.budget.model import (
    BudgetModel,
    BudgetTerm,
    Limit,
    Price,
    driver_limit,
    stream_limit,
    total,
)
from dist_aclgraph.graph.budget.offer import StreamOffer
from dist_aclgraph.graph.budget.workload import Workload


@dataclass(frozen=True)
class CalibratedBudget:
    """A rank's probes say what its buckets take: as many streams each, and bytes by tokens.

    Each rank captures and releases the largest bucket of each family. A family that nobody probed,
    or a device whose count of streams does not follow graphs, is priced by CANN's accounting with
    pinned ids, and the lines say so: of the readings of CANN's sources it is the most careful.
    """

    name: BudgetModelName = "calibrated"
    fallback: BudgetModel = field(default_factory=CannPinnedBudget)

    def price(self, family: GraphFamily, workload: Workload, offer: StreamOffer) -> Price:
        probes = offer.probes_of(family)
        if probes and offer.counts_graphs:
            why = f"what {probes[0].graph} took on rank {offer.rank}"
            return (BudgetTerm("probed", probes[0].streams, why),)
        cause = "the device's count does not follow graphs" if probes else "not probed"
        guessed = self.fallback.price(family, workload, offer)
        return tuple(
            replace(term, why=f"{term.why} ({cause}: {self.fallback.name})") for term in guessed
        )

    def fixed(self, workload: Workload, offer: StreamOffer) -> Price:
        return ()

    def limits(
        self, families: Sequence[GraphFamily], workload: Workload, offer: StreamOffer
    ) -> tuple[Limit, ...]:
        prices = [total(self.price(family, workload, offer)) for family in families]
        return (stream_limit(prices, offer), *driver_limit(families, offer))

    def bytes_per_token(self, family: GraphFamily, workload: Workload, offer: StreamOffer) -> float:
        if probes := offer.probes_of(family):
            return probes[0].bytes / probes[0].graph.num_tokens
        return self.fallback.bytes_per_token(family, workload, offer)
