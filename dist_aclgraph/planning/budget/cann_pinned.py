"""How CANN counts streams with old drivers: a captured stream keeps its id until the stream is
released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.captured import price_of, shapes
from dist_aclgraph.planning.budget.model import (
    Limit,
    Price,
    driver_limit,
    stream_limit,
    total,
)
from dist_aclgraph.planning.budget.offer import StreamOffer
from dist_aclgraph.planning.budget.workload import Workload


@dataclass(frozen=True)
class CannPinnedBudget:
    """Counts stream ids: one id for each lane (captured stream) of each graph, one id for each
    further queue of a long lane, and one id for each of HCCL's streams in the graph. The ids that
    HCCL's domains use outside of graphs are not counted. These domains already exist when a rank
    counts its free ids.
    """

    workload: Workload
    name: BudgetModelName = "cann-pinned"

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        return price_of(shapes(family, self.workload), self.workload)

    def fixed(self, offer: StreamOffer) -> Price:
        return ()

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        prices = [total(self.price(family, offer)) for family in families]
        return (stream_limit(prices, offer), *driver_limit(families, offer))

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        return self.workload.bytes_per_token
