"""What captured graphs cost in streams, and how many buckets a rank can afford.

``formula.py`` holds the historical formulas, exact; ``domains.py`` the price of a communication
domain; ``models.py`` the budget models that price a workload on a rank's offer.
"""

from dist_aclgraph.graph.budget.domains import streams_per_domain
from dist_aclgraph.graph.budget.formula import (
    LegacyInputs,
    Variant,
    legacy_sizes,
    max_buckets,
    trim_sizes,
)
from dist_aclgraph.graph.budget.models import (
    BudgetModel,
    BudgetTerm,
    LegacyBudget,
    StreamOffer,
    Workload,
    make_budget_model,
)

__all__ = [
    "BudgetModel",
    "BudgetTerm",
    "LegacyBudget",
    "LegacyInputs",
    "StreamOffer",
    "Variant",
    "Workload",
    "legacy_sizes",
    "make_budget_model",
    "max_buckets",
    "streams_per_domain",
    "trim_sizes",
]
