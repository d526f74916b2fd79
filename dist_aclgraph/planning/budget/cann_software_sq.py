"""CANN's own accounting with new drivers: graphs borrow their queues.

Capture takes a stream id for each lane as before; queues are bound when a graph runs, and idle
graphs lose theirs in the order of their creation. So ids still limit the number of graphs, and
queues limit only the width of one graph. ``aclrtGetStreamAvailableNum`` returns the free queues.
Their number equals that of the free ids when offers are made, before anything was captured, but not
later. All this is a reading of CANN's sources; if a rank behaves differently, the plan shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.cann_pinned import CannPinnedBudget
from dist_aclgraph.planning.budget.captured import shapes
from dist_aclgraph.planning.budget.model import Limit, total
from dist_aclgraph.planning.budget.offer import StreamOffer
from dist_aclgraph.planning.budget.workload import Workload

QUEUES = 1024  # of one graph, and of all bound graphs of a device


@dataclass(frozen=True)
class CannSoftwareSqBudget(CannPinnedBudget):
    """Ids as with pinned queues; a graph of more than 1024 queues cannot run (EE1023).

    Graphs that together need more than 1024 queues take turns, and each is bound again at a cost.
    """

    name: BudgetModelName = "cann-software-sq"

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        too_wide = tuple(int(_widest(family, self.workload) > QUEUES) for family in families)
        one_graph = Limit(f"buckets with a graph of more than {QUEUES} queues", 0, too_wide)
        return (*super().limits(families, offer), one_graph)


def _widest(family: GraphFamily, workload: Workload) -> int:
    """Return the queues of the graph that needs the most."""
    return max(total(shape.price(workload)) for shape in shapes(family, workload))
