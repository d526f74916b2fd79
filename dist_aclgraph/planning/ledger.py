"""The ledger of one rank: the streams and bytes that it offers for graphs, and the predicted and
the measured cost of its graphs.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from dist_aclgraph.planning.budget import BudgetModel, Price, StreamOffer, total
from dist_aclgraph.planning.plan import GraphPlan

TOLERANCE = 0.10  # a prediction with a larger relative error causes a warning


class LedgerEntry(msgspec.Struct, kw_only=True):
    """The predicted and the measured number of streams or bytes of one item, e.g. of bucket 32 or
    of the pool.
    """

    term: str
    unit: str  # "streams" or "bytes"
    predicted: int | None  # None if the budget model does not predict the item
    measured: int | None = None  # set by the rank after the capture
    parts: dict[str, int] = {}  # number of streams for each part of the price, if known

    @property
    def is_off(self) -> bool:
        """Whether prediction and measurement differ by more than 10 %."""
        if self.measured is None or self.predicted is None:
            return False
        return abs(self.measured - self.predicted) > TOLERANCE * self.predicted

    def describe(self) -> str:
        """Return a sentence with the predicted and the measured cost. If parts of the predicted
        cost are known, the sentence also names the part whose size is closest to the gap.

        The gap is the difference between prediction and measurement. The named part need not be the
        cause of the gap, because devices do not report what uses their streams.
        """
        text = f"{self.term} took {self.measured} {self.unit}, predicted {self.predicted}"
        if not self.parts or self.measured is None or self.predicted is None:
            return text
        gap = abs(self.measured - self.predicted)
        nearest = min(self.parts, key=lambda name: abs(self.parts[name] - gap))
        lines = ", ".join(f"{name} {count}" for name, count in self.parts.items())
        return f"{text} ({lines}); nearest to the difference of {gap}: {nearest}"


class Ledger(msgspec.Struct, kw_only=True):
    """The streams and bytes that one rank has offered for graphs, and the amounts that its graphs
    use, both predicted and measured.
    """

    rank: int
    offered_streams: int
    offered_bytes: int
    entries: list[LedgerEntry]
    terms: dict[str, int] = {}  # the parts of the price of one bucket, and of the fixed price
    counts_streams: bool = True  # whether captures change the reported number of free streams

    @classmethod
    def predict(cls, offer: StreamOffer, plan: GraphPlan, budget_model: BudgetModel) -> Ledger:
        """Return the ledger of a rank before captures. It contains no measurements yet."""
        prices = {family.name: budget_model.price(family, offer) for family in plan.families}
        fixed = budget_model.fixed(offer) if plan.families else ()
        entries = [
            LedgerEntry(
                term=str(graph),
                unit="streams",
                predicted=total(prices[family.name]),
                parts=_by_name(prices[family.name]),
            )
            for graph in plan.capture_order
            for family in plan.families
            if family.has(graph)
        ]
        if plan.families:
            pool = pool_bytes(plan, offer, budget_model) or None
            entries.append(LedgerEntry(term="graph pool", unit="bytes", predicted=pool))
        return cls(
            rank=offer.rank,
            offered_streams=offer.usable,
            offered_bytes=offer.free_bytes,
            entries=entries,
            terms={
                f"{name}: {term.label}": term.total
                for name, price in {**prices, "fixed": fixed}.items()
                for term in price
            },
            counts_streams=offer.counts_graphs,
        )

    @property
    def predicted_streams(self) -> int:
        return sum(entry.predicted or 0 for entry in self.entries if entry.unit == "streams")

    def measure(self, term: str, value: int, unit: str = "streams") -> None:
        """Set the measured cost of the item ``term``. If the item has no prediction, its prediction
        becomes 0.

        A measured number of streams is ignored if captures do not change the number of free streams
        that the device reports.
        """
        if unit == "streams" and not self.counts_streams:
            return
        for entry in self.entries:
            if (entry.term, entry.unit) == (term, unit):
                entry.measured = value
                return
        self.entries.append(LedgerEntry(term=term, unit=unit, predicted=0, measured=value))

    def keep(self, plan: GraphPlan) -> None:
        """Remove the entries of graphs that are not in ``plan``."""
        graphs = {str(graph) for graph in plan.capture_order}
        self.entries = [e for e in self.entries if e.unit != "streams" or e.term in graphs]

    def warnings(self) -> list[str]:
        """Return a sentence for each item whose measurement differs from its prediction by more
        than 10 %, and one more sentence if streams cannot be measured.
        """
        off = [entry.describe() for entry in self.entries if entry.is_off]
        if not self.counts_streams:
            off.append(
                "streams of graphs are not measured: this device's count does not follow them"
            )
        return [f"rank {self.rank}: {sentence}" for sentence in off]


def _by_name(price: Price) -> dict[str, int]:
    """Return the numbers of streams of a price's parts. The keys are the names of the parts. Parts
    with the same name are added up.
    """
    parts: Counter[str] = Counter()
    for term in price:
        parts[term.name] += term.total
    return dict(parts)


def pool_bytes(plan: GraphPlan, offer: StreamOffer, budget_model: BudgetModel) -> int:
    """Return how many bytes all graphs of a plan together need on a rank; 0 if unknown.

    All graphs share one pool, and the largest graph is captured first. So only the most expensive
    graph determines the result.
    """
    return max(
        (
            math.ceil(max(family.buckets) * budget_model.bytes_per_token(family, offer))
            for family in plan.families
        ),
        default=0,
    )
