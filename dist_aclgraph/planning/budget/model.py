"""What a budget model answers: prices, itemised, and the limits that the counts must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.offer import StreamOffer
from dist_aclgraph.planning.budget.workload import Workload


@dataclass(frozen=True)
class BudgetTerm:
    """One line of a price.

    Attributes:
        name: who takes the streams.
        total: how many in each bucket.
        why: in plain words.
        of: which of a bucket's graphs, where they differ.
    """

    name: str
    total: int
    why: str
    of: str = ""

    @property
    def label(self) -> str:
        return f"{self.of}: {self.name}" if self.of else self.name


Price = tuple[BudgetTerm, ...]


@dataclass(frozen=True)
class Limit:
    """What a rank has of something, and what one bucket of each family takes of it.

    Attributes:
        what: in plain words, in the plural.
        amount: what is left for buckets, fixed prices taken off.
        prices: one for each family.
    """

    what: str
    amount: int
    prices: tuple[int, ...]

    def admits(self, counts: Sequence[int]) -> bool:
        """Whether so many buckets of each family are paid for; the fewer, the likelier."""
        return sum(p * n for p, n in zip(self.prices, counts, strict=True)) <= self.amount

    def most(self, family: int) -> int | None:
        """Return how many buckets of one family alone are paid for, None where it is not asked."""
        price = self.prices[family]
        return None if price == 0 else max(0, self.amount // price)


class BudgetModel(Protocol):
    """Prices the graphs of one workload in streams and bytes. Knows nothing of negotiation.

    All methods are pure.
    """

    @property
    def name(self) -> BudgetModelName: ...

    @property
    def workload(self) -> Workload:
        """What is captured."""

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        """Return the streams that one bucket of a family takes on the rank, itemised."""

    def fixed(self, offer: StreamOffer) -> Price:
        """Return the streams that are gone before the first bucket, itemised."""

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        """Return all limits that the numbers of buckets must keep on the rank.

        Args:
            families: with all candidate sizes.
        """

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        """Return the device memory of one bucket, divided by its tokens; 0 where unknown."""


def total(price: Price) -> int:
    """Return the streams of all lines together."""
    return sum(term.total for term in price)


def stream_limit(prices: Sequence[int], offer: StreamOffer) -> Limit:
    """Return the limit that the rank's streams set."""
    return Limit("streams for graphs", offer.usable, tuple(prices))


def driver_limit(families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
    """Return the limit that the device's driver sets on piecewise sizes, if it sets one."""
    if offer.max_sizes is None:
        return ()
    prices = tuple(int(family.run_mode == "PIECEWISE") for family in families)
    return (Limit("piecewise sizes that its driver takes", offer.max_sizes, prices),)
