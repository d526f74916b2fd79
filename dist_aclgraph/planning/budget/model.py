"""The interface of a budget model: prices, and limits on the numbers of buckets.

A price says how many streams or bytes one bucket needs, item by item.
"""

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
    """A part of the price of a bucket, which is one line in the report.

    Attributes:
        name: the owner of the streams.
        total: number of streams that the owner uses in each bucket.
        why: why the bucket needs these streams, in plain words.
        of: the graph to which the line belongs, if a bucket has different graphs.
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
    """A rank's available amount of a resource, and the amount that one bucket of each family needs.

    Attributes:
        what: name of the resource for messages, in the plural.
        amount: available amount for buckets, after fixed prices are subtracted.
        prices: amount that one bucket needs, for each family.
    """

    what: str
    amount: int
    prices: tuple[int, ...]

    def admits(self, counts: Sequence[int]) -> bool:
        """Whether the amount is enough for ``counts`` buckets of each family.

        If the amount is enough, it is also enough for fewer buckets.
        """
        return sum(p * n for p, n in zip(self.prices, counts, strict=True)) <= self.amount

    def most(self, family: int) -> int | None:
        """Return how many buckets a family could have without other families; None if there is no
        limit.
        """
        price = self.prices[family]
        return None if price == 0 else max(0, self.amount // price)


class BudgetModel(Protocol):
    """Computes the prices of one workload's graphs in streams and bytes. Knows nothing about
    negotiation. All methods are pure.
    """

    @property
    def name(self) -> BudgetModelName: ...

    @property
    def workload(self) -> Workload:
        """The workload whose graphs have these prices."""

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        """Return the itemised number of streams of one bucket of a family on the rank."""

    def fixed(self, offer: StreamOffer) -> Price:
        """Return the itemised number of streams that are used before the first bucket."""

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        """Return all limits on the numbers of buckets on the rank.

        Args:
            families: families with all candidate sizes.
        """

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        """Return the device memory of one bucket in bytes, divided by its tokens; 0 if unknown."""


def total(price: Price) -> int:
    """Return the sum of the streams of all lines."""
    return sum(term.total for term in price)


def stream_limit(prices: Sequence[int], offer: StreamOffer) -> Limit:
    """Return the limit that follows from the rank's streams."""
    return Limit("streams for graphs", offer.usable, tuple(prices))


def driver_limit(families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
    """Return the driver's limit of piecewise sizes; empty if the driver has no limit."""
    if offer.max_sizes is None:
        return ()
    prices = tuple(int(family.run_mode == "PIECEWISE") for family in families)
    return (Limit("piecewise sizes that its driver takes", offer.max_sizes, prices),)
