"""How CANN counts streams and queues with new drivers: a graph has no queues before it first runs,
and may lose its queues while it is idle.

A capture uses one stream id for each lane (captured stream), as with old drivers. A graph gets
queues when it runs. If too few queues are free, idle graphs lose their queues, and the graphs that
were created first lose them first. A captured graph always keeps its ids, so the number of ids
limits the number of graphs. The number of queues limits only the size of each single graph, not the
number of graphs. ``aclrtGetStreamAvailableNum`` returns the number of free queues. When ranks
report their free streams, no graph is captured yet, so this number equals the number of free ids.
Later, the two numbers can differ. These rules follow from CANN's sources and were not measured. If
a capture fails although the rules allow it, the plan gets smaller.
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

# Maximum number of queues of one graph, and of all graphs on a device together at any time.
QUEUES = 1024


@dataclass(frozen=True)
class CannSoftwareSqBudget(CannPinnedBudget):
    """Counts stream ids like ``CannPinnedBudget``. In addition, a graph with more than 1024 queues
    cannot run (EE1023).

    If several graphs together need more than 1024 queues, a graph can lose its queues to another
    graph. The next replay of this graph then takes longer, because the graph must get queues again.
    """

    name: BudgetModelName = "cann-software-sq"

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        too_wide = tuple(int(_widest(family, self.workload) > QUEUES) for family in families)
        one_graph = Limit(f"buckets with a graph of more than {QUEUES} queues", 0, too_wide)
        return (*super().limits(families, offer), one_graph)


def _widest(family: GraphFamily, workload: Workload) -> int:
    """Return the number of queues of the graph that needs the most queues."""
    return max(total(shape.price(workload)) for shape in shapes(family, workload))
