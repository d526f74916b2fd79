"""A plan that follows its traffic while it serves: when to change it, and by which single steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.graph.buckets import GraphFamily
from dist_aclgraph.graph.budget import (
    BudgetModel,
    Limit,
    StreamOffer,
    Workload,
    share_cards,
    total,
)
from dist_aclgraph.graph.choice import expected_cost, step_costs
from dist_aclgraph.graph.descriptor import BatchDescriptor
from dist_aclgraph.graph.ledger import pool_bytes
from dist_aclgraph.graph.negotiation import negotiate, step_seconds, tightest_limits
from dist_aclgraph.graph.plan import GraphPlan
from dist_aclgraph.graph.traffic import Traffic, weights_of

MIN_GAIN = 0.05  # share of the expected cost that a new plan must save to be worth its captures
MIN_WEIGHT = 256.0  # steps seen, old ones faded, before their histogram is believed


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Capture one graph on all ranks."""

    graph: BatchDescriptor


class Release(msgspec.Struct, frozen=True, tag=True):
    """Release one graph on all ranks."""

    graph: BatchDescriptor


Action = Capture | Release


def propose(
    plan: GraphPlan,
    traffic: Traffic,
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
    workload: Workload,
    *,
    min_gain: float = MIN_GAIN,
    min_weight: float = MIN_WEIGHT,
) -> GraphPlan | None:
    """Return the next version of a plan, or None where the traffic gives no reason for one.

    The new plan has the same families, each with the largest bucket that it has now, so that every
    batch that replays a graph still will.

    Args:
        traffic: seen since the plan holds, old steps faded.
        offers: what the ranks have left now, with the graphs of ``plan`` captured.
        families: with all candidate sizes.
        min_gain: share of the expected cost that must be saved.
        min_weight: steps that must have been seen.

    Raises:
        GraphError: there are no offers, or two of one rank.
    """
    if not plan.families or traffic.weight < min_weight:
        return None
    try:
        new = negotiate(
            _without(plan, offers, budget_model, workload),
            [_candidates(family, families) for family in plan.families],
            budget_model,
            workload,
            traffic=traffic,
            version=plan.version + 1,
            max_num_seqs=plan.max_num_seqs,
        )
    except StreamBudgetError:  # the model thinks less of the ranks than they have captured
        return None
    if not _keeps_reach(plan, new):
        return None
    before = _expected_cost(plan, traffic, offers)
    after = _expected_cost(new, traffic, offers)
    gain = 1 - after / before if before else 0.0
    if gain < min_gain or new.families == plan.families:
        return None
    reason = f"chosen again for {traffic.weight:.0f} steps seen: expected cost falls by {gain:.0%}"
    return msgspec.structs.replace(new, reasons=(*plan.reasons, reason))


def transition(
    old: GraphPlan,
    new: GraphPlan,
    offers: Sequence[StreamOffer],
    budget_model: BudgetModel,
    workload: Workload,
) -> tuple[Action, ...]:
    """Return the captures and releases, one graph each, that lead from one plan to the other.

    Captures come first, largest first. Where the old graphs leave no room for the next one, one of
    those that must go is released before it. Every limit that both plans keep is kept after each
    action, and the largest bucket of each family is there all the time.

    Args:
        offers: what the ranks have left now, with the graphs of ``old`` captured.

    Raises:
        GraphError: the plans differ in their families, or in the largest bucket of one.
    """
    if not _keeps_reach(old, new):
        raise GraphError(
            f"plan {new.version} lacks a family or the largest bucket of one of plan {old.version}"
        )
    rank_limits = tightest_limits(
        _without(old, offers, budget_model, workload), new.families, budget_model, workload
    )
    return tuple(_actions(old, new, [item.limit for item in rank_limits]))


def apply(plan: GraphPlan, action: Action) -> GraphPlan:
    """Return the plan that holds after an action, as its next version."""
    graph = action.graph
    families = []
    for family in plan.families:
        buckets = set(family.buckets)
        if (family.run_mode, family.query_len) == (graph.mode, graph.query_len):
            change = buckets.add if isinstance(action, Capture) else buckets.discard
            change(graph.num_tokens)
        families.append(msgspec.structs.replace(family, buckets=tuple(sorted(buckets))))
    return msgspec.structs.replace(plan, version=plan.version + 1, families=tuple(families))


def _actions(old: GraphPlan, new: GraphPlan, limits: Sequence[Limit]) -> Iterator[Action]:
    held = list(old.capture_order)
    surplus = [graph for graph in held if graph not in new.capture_order]
    for graph in new.capture_order:
        if graph in held:
            continue
        while surplus and not _admitted([*held, graph], new, limits):
            released = _same_kind_first(surplus, graph)
            surplus.remove(released)
            held.remove(released)
            yield Release(released)
        held.append(graph)
        yield Capture(graph)
    yield from map(Release, surplus)


def _same_kind_first(surplus: Sequence[BatchDescriptor], graph: BatchDescriptor) -> BatchDescriptor:
    kind = (graph.mode, graph.query_len)
    return next((g for g in surplus if (g.mode, g.query_len) == kind), surplus[0])


def _admitted(graphs: Sequence[BatchDescriptor], plan: GraphPlan, limits: Sequence[Limit]) -> bool:
    kinds = [(graph.mode, graph.query_len) for graph in graphs]
    counts = [kinds.count((family.run_mode, family.query_len)) for family in plan.families]
    return all(limit.admits(counts) for limit in limits)


def _keeps_reach(old: GraphPlan, new: GraphPlan) -> bool:
    """Whether both have the same families with the same largest bucket."""

    def reach(plan: GraphPlan) -> list[tuple[str, int, int]]:
        return sorted((f.run_mode, f.query_len, f.buckets[-1]) for f in plan.families)

    return reach(old) == reach(new)


def _candidates(family: GraphFamily, families: Sequence[GraphFamily]) -> GraphFamily:
    """Return the sizes that a family may have: up to the largest that the ranks captured."""
    kind = (family.run_mode, family.query_len)
    wanted = next((f.buckets for f in families if (f.run_mode, f.query_len) == kind), ())
    largest = family.buckets[-1]
    sizes = sorted({*family.buckets, *(size for size in wanted if size <= largest)})
    return msgspec.structs.replace(family, buckets=tuple(sizes))


def _without(
    plan: GraphPlan, offers: Sequence[StreamOffer], budget_model: BudgetModel, workload: Workload
) -> list[StreamOffer]:
    """Return the offers as they would be if no graph of the plan were captured."""

    def held(offer: StreamOffer) -> int:
        prices = (budget_model.price(family, workload, offer) for family in plan.families)
        return sum(
            total(price) * len(family.buckets)
            for price, family in zip(prices, plan.families, strict=True)
        )

    return [
        msgspec.structs.replace(
            offer,
            card="",  # its streams are divided already
            available=offer.available + held(offer),
            free_bytes=offer.free_bytes + pool_bytes(plan, offer, budget_model, workload),
        )
        for offer in share_cards(offers)
    ]


def _expected_cost(plan: GraphPlan, traffic: Traffic, offers: Sequence[StreamOffer]) -> float:
    cost = 0.0
    for family, weights in zip(plan.families, weights_of(traffic, plan.families), strict=True):
        costs = step_costs(family.buckets, step_seconds(family, offers))
        cost += expected_cost(
            family.buckets, weights, dict(zip(family.buckets, costs, strict=True))
        )
    return cost
