"""Predicts how many streams graphs use on the rank with the fewest free streams. The prediction
uses the budget model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget import StreamOffer, total
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import NegotiatedPlan
from dist_aclgraph.simulate.deployment import AssumedDeployment, distinct

# Maps a name to a number of streams. The value of a family's name is the number of streams of the
# family's graphs. The value of "fixed" is the number of streams that are in use before the first
# capture. The value of "all" is the sum.
Held = dict[str, int]


def tightest_offer(deployment: AssumedDeployment, negotiated: NegotiatedPlan) -> StreamOffer:
    """Return the offer of the rank that will have the fewest free streams after all graphs of the
    plan are captured.
    """
    model = deployment.budget_model

    def left(offer: StreamOffer) -> int:
        ledger = Ledger.predict(offer, negotiated.plan, model)
        return offer.usable - ledger.predicted_streams - total(model.fixed(offer))

    return min(distinct(negotiated.offers), key=left)


def streams_held(
    deployment: AssumedDeployment, offer: StreamOffer
) -> Callable[[Iterable[BatchDescriptor]], Held]:
    """Return a function that predicts how many streams the rank of ``offer`` uses for a set of
    graphs.
    """
    planner, model = deployment.planner, deployment.budget_model
    kinds = [*planner.families, *planner.lazy_families]
    families: dict[str, GraphFamily] = {family.name: family for family in kinds}
    prices = {name: total(model.price(f, offer)) for name, f in families.items()}
    fixed = total(model.fixed(offer)) if families else 0

    def held(graphs: Iterable[BatchDescriptor]) -> Held:
        found = dict.fromkeys(families, 0)
        for graph in graphs:
            name = next(name for name, family in families.items() if family.is_kind_of(graph))
            found[name] += prices[name]
        return {**found, "fixed": fixed, "all": sum(found.values()) + fixed}

    return held


def is_affordable(deployment: AssumedDeployment, offer: StreamOffer, plan: GraphPlan) -> bool:
    """Whether the budget model predicts that the offer's rank can capture all graphs of a plan."""
    limits = deployment.budget_model.limits(plan.families, offer)
    counts = [len(family.buckets) for family in plan.families]
    return all(limit.admits(counts) for limit in limits)
