"""The ledger of one rank: its offer, and the predicted and the measured cost of graphs."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from dist_aclgraph.planning.budget import BudgetModel, Price, StreamOffer, total
from dist_aclgraph.planning.plan import GraphPlan

TOLERANCE = 0.10  # A prediction with a larger relative error causes a warning.


class LedgerEntry(msgspec.Struct, kw_only=True):
    """The predicted and the measured streams or bytes of one item, e.g. bucket 32 or the pool."""

    term: str
    unit: str  # "streams" or "bytes"
    predicted: int | None  # None if the budget model does not predict the item
    measured: int | None = None  # set by the rank after the capture
    parts: dict[str, int] = {}  # the predicted streams of each owner, if known

    @property
    def is_off(self) -> bool:
        """Whether prediction and measurement are more than 10 % apart."""
        if self.measured is None or self.predicted is None:
            return False
        return abs(self.measured - self.predicted) > TOLERANCE * self.predicted

    def describe(self) -> str:
        """Return a sentence with prediction and measurement, and with the part of the price that is
        closest to the gap.

        The gap is the difference between prediction and measurement. The named part may not be the
        cause: devices report the number of free streams, but not the owners of used streams.
        """
        text = f"{self.term} took {self.measured} {self.unit}, predicted {self.predicted}"
        if not self.parts or self.measured is None or self.predicted is None:
            return text
        gap = abs(self.measured - self.predicted)
        nearest = min(self.parts, key=lambda name: abs(self.parts[name] - gap))
        lines = ", ".join(f"{name} {count}" for name, count in self.parts.items())
        return f"{text} ({lines}); nearest to the difference of {gap}: {nearest}"


class Ledger(msgspec.Struct, kw_only=True):
    """The streams and bytes that one rank offered, and their predicted and measured use."""

    rank: int
    offered_streams: int
    offered_bytes: int
    entries: list[LedgerEntry]
    terms: dict[str, int] = {}  # the price of one bucket and the fixed price, item by item
    counts_streams: bool = True  # whether captures change the device's count of free streams

    @classmethod
    def predict(cls, offer: StreamOffer, plan: GraphPlan, budget_model: BudgetModel) -> Ledger:
        """Return the ledger of a rank before captures, with predictions and no measurement."""
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
        """Set the measured cost of ``term``; a term without a prediction gets the prediction 0.

        The measured streams are ignored if captures do not change the device's count of free
        streams.
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
        """Return a sentence for each term whose measurement differs by more than 10 % from the
        prediction, and one sentence if streams cannot be measured.
        """
        off = [entry.describe() for entry in self.entries if entry.is_off]
        if not self.counts_streams:
            off.append(
                "streams of graphs are not measured: this device's count does not follow them"
            )
        return [f"rank {self.rank}: {sentence}" for sentence in off]


def _by_name(price: Price) -> dict[str, int]:
    """Return the number of streams that each owner uses for all graphs of a bucket together."""
    parts: Counter[str] = Counter()
    for term in price:
        parts[term.name] += term.total
    return dict(parts)


def pool_bytes(plan: GraphPlan, offer: StreamOffer, budget_model: BudgetModel) -> int:
    """Return the bytes that all graphs of a plan need together on a rank; 0 if unknown.

    Graphs share one pool and are captured largest first, so only the most expensive graph counts.
    """
    return max(
        (
            math.ceil(max(family.buckets) * budget_model.bytes_per_token(family, offer))
            for family in plan.families
        ),
        default=0,
    )
