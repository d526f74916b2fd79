"""The cost of captured graphs in streams and bytes, and the budget of a rank.

``formula.py`` contains the exact formulas of earlier releases of vllm-ascend. ``domains.py``
computes how many streams a communication domain uses. ``captured.py`` describes the contents of a
bucket's graphs: their number, and the captured streams of each graph. Every budget model has its
own file.
"""

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import trim_sizes
from dist_aclgraph.planning.budget.calibrated import CalibratedBudget
from dist_aclgraph.planning.budget.cann_pinned import CannPinnedBudget
from dist_aclgraph.planning.budget.cann_software_sq import CannSoftwareSqBudget
from dist_aclgraph.planning.budget.domains import streams_per_domain, streams_per_graph
from dist_aclgraph.planning.budget.formula import (
    LegacyInputs,
    Variant,
    legacy_sizes,
    max_buckets,
)
from dist_aclgraph.planning.budget.legacy import LegacyBudget
from dist_aclgraph.planning.budget.links import (
    MAX_LINKS,
    PART_BYTES,
    reserved_streams,
    streams_of_links,
)
from dist_aclgraph.planning.budget.model import BudgetModel, BudgetTerm, Limit, Price, total
from dist_aclgraph.planning.budget.offer import (
    BucketProbe,
    StreamOffer,
    max_piecewise_sizes,
    share_cards,
)
from dist_aclgraph.planning.budget.workload import Workload

__all__ = [
    "MAX_LINKS",
    "PART_BYTES",
    "BucketProbe",
    "BudgetModel",
    "BudgetTerm",
    "CalibratedBudget",
    "CannPinnedBudget",
    "CannSoftwareSqBudget",
    "LegacyBudget",
    "LegacyInputs",
    "Limit",
    "Price",
    "StreamOffer",
    "Variant",
    "Workload",
    "legacy_sizes",
    "make_budget_model",
    "max_buckets",
    "max_piecewise_sizes",
    "reserved_streams",
    "share_cards",
    "streams_of_links",
    "streams_per_domain",
    "streams_per_graph",
    "total",
    "trim_sizes",
]


def make_budget_model(name: BudgetModelName, workload: Workload) -> BudgetModel:
    """Return the budget model with the name ``name``, for a workload."""
    if name == "cann-pinned":
        return CannPinnedBudget(workload)
    if name == "cann-software-sq":
        return CannSoftwareSqBudget(workload)
    if name == "calibrated":
        return CalibratedBudget(workload)
    return LegacyBudget(name, workload)
