"""CANN's own accounting with new drivers (software queues): capture only records.

A graph takes queues when it is executed, and idle graphs give theirs back, in the order of their
creation. That ids do not limit it follows from the field: upstream dropped its formula for these
drivers and captures thousands of graphs. The sources do not settle it: there each captured stream
takes an id, as in the emulator, and no call tells how many are left. A rank that runs out of them
shrinks the plan; ``cann-pinned`` counts them beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.graph.buckets import GraphFamily
from dist_aclgraph.graph.budget.captured import price_of, shapes
from dist_aclgraph.graph.budget.model import BudgetTerm, Limit, Price, driver_limit, total
from dist_aclgraph.graph.budget.offer import StreamOffer
from dist_aclgraph.graph.budget.workload import Workload

QUEUES = 1024  # of one graph, and of all graphs of a device that hold some at once


@dataclass(frozen=True)
class CannSoftwareSqBudget:
    """No limit by ids; one whose lanes need more than 1024 queues can never run (EE1023).

    Graphs that together need more than 1024 take turns: each then pays for being bound again.
    """

    name: BudgetModelName = "cann-software-sq"

    def price(self, family: GraphFamily, workload: Workload, offer: StreamOffer) -> Price:
        queues = total(price_of(shapes(family, workload), workload))
        why = f"capture takes none; {queues} of {QUEUES} queues while the bucket's graphs run"
        return (BudgetTerm("stream ids", 0, why),)

    def fixed(self, workload: Workload, offer: StreamOffer) -> Price:
        return ()

    def limits(
        self, families: Sequence[GraphFamily], workload: Workload, offer: StreamOffer
    ) -> tuple[Limit, ...]:
        too_wide = tuple(int(_widest(family, workload) > QUEUES) for family in families)
        one_graph = Limit(f"buckets whose graphs need more than {QUEUES} queues", 0, too_wide)
        return (one_graph, *driver_limit(families, offer))

    def bytes_per_token(self, family: GraphFamily, workload: Workload, offer: StreamOffer) -> float:
        return workload.bytes_per_token


def _widest(family: GraphFamily, workload: Workload) -> int:
    """Return the queues of the graph that needs most."""
    return max(total(shape.price(workload)) for shape in shapes(family, workload))
