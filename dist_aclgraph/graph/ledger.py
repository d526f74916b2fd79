"""The ledger of one rank: what it offered, what the plan should cost, what capture did cost."""

from __future__ import annotations

import msgspec

from dist_aclgraph.graph.budget import BudgetModel, BudgetTerm, StreamOffer, Workload
from dist_aclgraph.graph.plan import GraphPlan

TOLERANCE = 0.10  # relative difference between prediction and measurement that is worth a warning


class LedgerEntry(msgspec.Struct, kw_only=True):
    """Streams or bytes of one thing that is paid for, e.g. bucket 32 or the shared pool."""

    term: str
    unit: str  # "streams" or "bytes"
    predicted: int
    measured: int | None = None  # filled by the rank that captures


class Ledger(msgspec.Struct, kw_only=True):
    """What one rank offered, was predicted to pay, and has paid; it travels in reports."""

    rank: int
    offered_streams: int
    offered_bytes: int
    entries: list[LedgerEntry]
    terms: dict[str, int] = {}  # the price of one bucket and the fixed price, itemised

    @classmethod
    def predict(
        cls, offer: StreamOffer, plan: GraphPlan, budget_model: BudgetModel, workload: Workload
    ) -> Ledger:
        """Return the ledger of a rank before capture: everything predicted, nothing measured."""
        entries = [
            LedgerEntry(
                term=bucket_term(bucket),
                unit="streams",
                predicted=budget_model.price(bucket, workload),
            )
            for bucket in plan.capture_order
        ]
        if workload.bytes_per_token and plan.buckets:
            pool = plan.buckets[-1] * workload.bytes_per_token
            entries.append(LedgerEntry(term="graph pool", unit="bytes", predicted=pool))
        terms: list[BudgetTerm] = budget_model.explain(workload)
        return cls(
            rank=offer.rank,
            offered_streams=offer.usable,
            offered_bytes=offer.free_bytes,
            entries=entries,
            terms={term.name: term.total for term in terms},
        )

    @property
    def predicted_streams(self) -> int:
        return sum(entry.predicted for entry in self.entries if entry.unit == "streams")

    def measure(self, term: str, value: int, unit: str = "streams") -> None:
        """Enter what ``term`` really took; a term that nobody predicted counts as predicted 0."""
        for entry in self.entries:
            if (entry.term, entry.unit) == (term, unit):
                entry.measured = value
                return
        self.entries.append(LedgerEntry(term=term, unit=unit, predicted=0, measured=value))

    def warnings(self) -> list[str]:
        """Return a sentence for each term whose measurement is more than 10 % off."""
        return [
            f"rank {self.rank}: {entry.term} took {entry.measured} {entry.unit}, "
            f"predicted {entry.predicted}"
            for entry in self.entries
            if entry.measured is not None
            and abs(entry.measured - entry.predicted) > TOLERANCE * entry.predicted
        ]


def bucket_term(bucket: int) -> str:
    """Return the name under which a ledger keeps a bucket."""
    return f"bucket {bucket}"
