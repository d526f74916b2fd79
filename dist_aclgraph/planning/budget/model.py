"""The interface of a budget model. A budget model computes prices of buckets, and limits on the
number of buckets.

A price says how many streams or bytes one bucket needs. A price has several parts, one for each
reason (``BudgetTerm``).
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
    """One part of a bucket's price. The report has one line for each part.

    Attributes:
        name: name of the user of the streams, e.g. a communication domain.
        total: number of streams of this part in each bucket.
        why: the reason for which the bucket needs these streams, in plain words.
        of: description of the graph to which the part belongs, if a bucket has different graphs.
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
    """A limit on the numbers of buckets that a rank can capture. Each bucket needs a part of one
    resource.

    Attributes:
        what: name of the resource in messages, in the plural.
        amount: the amount that is available for buckets, after fixed prices were subtracted.
        prices: for each family, the amount that one bucket needs.
    """

    what: str
    amount: int
    prices: tuple[int, ...]

    def admits(self, counts: Sequence[int]) -> bool:
        """Whether the amount is enough for ``counts`` buckets of each family.

        An amount that is enough for some numbers of buckets is also enough for smaller numbers.
        """
        return sum(p * n for p, n in zip(self.prices, counts, strict=True)) <= self.amount

    def most(self, family: int) -> int | None:
        """Return how many buckets a family could have if it were the only family; None if there is
        no limit.
        """
        price = self.prices[family]
        return None if price == 0 else max(0, self.amount // price)


class BudgetModel(Protocol):
    """Computes the prices of one workload's graphs in streams and bytes. The model knows nothing
    about negotiation. All of its methods are pure.
    """

    @property
    def name(self) -> BudgetModelName: ...

    @property
    def workload(self) -> Workload:
        """The workload for whose graphs this model computes prices."""

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        """Return how many streams one bucket of a family needs on the rank with this offer."""

    def fixed(self, offer: StreamOffer) -> Price:
        """Return how many streams are used before the first bucket is captured."""

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        """Return, for the rank that has made the offer, all limits on the number of buckets.

        Args:
            families: the families of graphs, with all sizes that may be captured.
        """

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        """Return the device memory of one bucket in bytes, divided by its number of tokens; 0 if
        unknown.
        """


def total(price: Price) -> int:
    """Return the number of streams of all parts together."""
    return sum(term.total for term in price)


def stream_limit(prices: Sequence[int], offer: StreamOffer) -> Limit:
    """Return the limit that follows from the rank's number of available streams."""
    return Limit("streams for graphs", offer.usable, tuple(prices))


def driver_limit(families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
    """Return the driver's limit on the number of piecewise buckets; empty if the driver has no
    limit.
    """
    if offer.max_sizes is None:
        return ()
    prices = tuple(int(family.run_mode == "PIECEWISE") for family in families)
    return (Limit("piecewise sizes that its driver takes", offer.max_sizes, prices),)
