"""Adapts a plan to the traffic while a group serves. This module decides when the plan changes, and
which actions change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dist_aclgraph.config import GraphConfig
from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget import (
    BucketProbe,
    BudgetModel,
    Limit,
    StreamOffer,
    share_cards,
)
from dist_aclgraph.planning.choice import expected_cost, step_costs
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.negotiation import negotiate, step_seconds, tightest_limits
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import Traffic, weights_of

MIN_GAIN = 0.05  # minimum fraction of the expected cost that a new plan must save
MIN_WEIGHT = 256.0  # minimum number of observed steps; older steps count less
# Maximum number of reasons in a plan; older reasons are dropped. Without this maximum, each change
# would make plans longer, and plans are sent to all ranks.
MAX_REASONS = 32


class Capture(msgspec.Struct, frozen=True, tag=True):
    """The action that captures one graph on all ranks."""

    graph: BatchDescriptor


class Release(msgspec.Struct, frozen=True, tag=True):
    """The action that releases one graph on all ranks."""

    graph: BatchDescriptor


Action = Capture | Release


def choose_again(
    plan: GraphPlan,
    traffic: Traffic,
    offers: Sequence[StreamOffer],
    step_seconds: Mapping[BatchDescriptor, float],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
    config: GraphConfig,
) -> tuple[GraphPlan, tuple[Action, ...]] | None:
    """Return a plan that is better for the traffic, and the actions that lead to it; None if no
    plan is better.

    Args:
        step_seconds: for each graph, the measured time of a step that replays it, in seconds.
        offers: the offers from which ``plan`` was chosen.
        families: the families of graphs, with all sizes that may be captured.
    """
    offers = [_timed(offer, step_seconds) for offer in offers]
    better = propose(
        plan,
        traffic,
        offers,
        families,
        budget_model,
        min_gain=config.rebucket_gain,
        min_weight=config.rebucket_min_steps,
    )
    if better is None:
        return None
    return better, transition(plan, better, offers, budget_model)


def _timed(offer: StreamOffer, step_seconds: Mapping[BatchDescriptor, float]) -> StreamOffer:
    """Return the offer with additional probes, which contain measured step times. Prices still come
    from the first probes.

    A probe is a measured cost of one bucket. A kind of graph gets additional probes only if it
    already has a probe. An additional probe contains a time, but 0 streams and 0 bytes. If an
    additional probe were the first probe of its kind, the kind's price would be 0.
    """
    probed = {(probe.graph.mode, probe.graph.query_len) for probe in offer.probes}
    times = (
        BucketProbe(graph=graph, streams=0, bytes=0, replay_s=seconds)
        for graph, seconds in step_seconds.items()
        if (graph.mode, graph.query_len) in probed
    )
    return msgspec.structs.replace(offer, probes=(*offer.probes, *times))


def propose(
    plan: GraphPlan,
    traffic: Traffic,
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
    *,
    min_gain: float = MIN_GAIN,
    min_weight: float = MIN_WEIGHT,
) -> GraphPlan | None:
    """Return a plan that is much better for the traffic, as the next version of ``plan``; None if
    there is no such plan.

    The new plan has the same families, with the same largest buckets. So each batch that replays a
    graph of the old plan also replays a graph of the new plan.

    Args:
        traffic: the weights of the steps since the group began to use the plan; older steps have
            less weight.
        offers: the offers from which ``plan`` was chosen. The ranks made these offers before any
            capture.
        families: the families of graphs, with all sizes that may be captured.
        min_gain: the minimum fraction of the expected cost that the new plan must save.
        min_weight: minimum number of observed steps; older steps count less.

    Raises:
        GraphError: there are no offers, or two offers come from the same rank.
    """
    if not plan.families or traffic.weight < min_weight:
        return None
    try:
        new = negotiate(
            offers,
            [_candidates(family, families) for family in plan.families],
            budget_model,
            traffic=traffic,
            version=plan.version + 1,
            max_num_seqs=plan.max_num_seqs,
        )
    except StreamBudgetError:  # no bucket fits by the budget model, although ranks have graphs
        return None
    if not _keeps_reach(plan, new):
        return None
    before = _expected_cost(plan, traffic, offers)
    after = _expected_cost(new, traffic, offers)
    gain = 1 - after / before if before else 0.0
    if gain < min_gain or new.families == plan.families:
        return None
    new = _with_old_graphs(plan, new, offers, budget_model)
    reason = f"chosen again for {traffic.weight:.0f} steps seen: expected cost falls by {gain:.0%}"
    return msgspec.structs.replace(new, reasons=(*plan.reasons, reason)[-MAX_REASONS:])


def _with_old_graphs(
    old: GraphPlan, new: GraphPlan, offers: Sequence[StreamOffer], budget_model: BudgetModel
) -> GraphPlan:
    """Return the new plan, with as many additional graphs of the old plan as the limits allow.

    Without this extension, small changes of the traffic would release a graph, and later capture it
    again.
    """
    rank_limits = tightest_limits(share_cards(offers), new.families, budget_model)
    limits = [item.limit for item in rank_limits]
    graphs = list(new.capture_order)
    for graph in old.capture_order:
        if graph not in graphs and _admitted([*graphs, graph], new, limits):
            graphs.append(graph)
    families = (
        msgspec.structs.replace(
            family,
            buckets=tuple(sorted(graph.num_tokens for graph in graphs if family.is_kind_of(graph))),
        )
        for family in new.families
    )
    return msgspec.structs.replace(new, families=tuple(families))


def transition(
    old: GraphPlan,
    new: GraphPlan,
    offers: Sequence[StreamOffer],
    budget_model: BudgetModel,
) -> tuple[Action, ...]:
    """Return the actions that lead from one plan to the other. Each action captures or releases one
    graph.

    Captures come before releases, and the largest graph is captured first. But if too few streams
    or bytes are free for the next capture, a graph that is not in the new plan is released before
    this capture. If both plans are within a limit, the graphs that exist after each action are
    within this limit. The largest bucket of each family exists at all times.

    Args:
        offers: the offers from which ``old`` was chosen. The ranks made these offers before any
            capture.

    Raises:
        GraphError: the plans have different families, or the largest bucket of a family differs.
    """
    if not _keeps_reach(old, new):
        raise GraphError(
            f"plan {new.version} lacks a family or the largest bucket of one of plan {old.version}"
        )
    rank_limits = tightest_limits(share_cards(offers), new.families, budget_model)
    return tuple(_actions(old, new, [item.limit for item in rank_limits]))


def reunite(plans: Sequence[GraphPlan]) -> GraphPlan:
    """Return one plan for all groups, after a capture has failed in some groups. The plan contains
    the graphs that all groups have.

    The plan's version is newer than the versions of ``plans``. A graph that one group could not
    capture is not tried again in any group.
    """
    newest = max(plans, key=lambda plan: plan.version)
    families = []
    for family in newest.families:
        alike = [f for plan in plans for f in plan.families if _kind(f) == _kind(family)]
        if len(alike) < len(plans):
            continue
        buckets = set.intersection(*(set(f.buckets) for f in alike))
        limits = [f.max_buckets for f in alike if f.max_buckets is not None]
        families.append(
            msgspec.structs.replace(
                family,
                buckets=tuple(sorted(buckets)),
                refused=tuple(sorted({size for f in alike for size in f.refused})),
                max_buckets=min(limits, default=None),
            )
        )
    reason = "groups that captured different graphs keep what all of them have"
    return msgspec.structs.replace(
        newest,
        version=newest.version + 1,
        families=tuple(family for family in families if family.buckets),
        reasons=(*newest.reasons, reason)[-MAX_REASONS:],
    )


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
    same = [g for g in surplus if (g.mode, g.query_len) == (graph.mode, graph.query_len)]
    return [*same, *surplus][0]


def _admitted(graphs: Sequence[BatchDescriptor], plan: GraphPlan, limits: Sequence[Limit]) -> bool:
    counts = [sum(map(family.is_kind_of, graphs)) for family in plan.families]
    return all(limit.admits(counts) for limit in limits)


def _keeps_reach(old: GraphPlan, new: GraphPlan) -> bool:
    """Whether both plans have the same families with the same largest buckets."""

    def reach(plan: GraphPlan) -> list[tuple[str, int, int]]:
        return sorted((*_kind(f), f.buckets[-1]) for f in plan.families)

    return reach(old) == reach(new)


def _candidates(family: GraphFamily, families: Sequence[GraphFamily]) -> GraphFamily:
    """Return a family with all sizes that may be captured, up to the largest size that ranks have
    captured.
    """
    wanted = next((f.buckets for f in families if _kind(f) == _kind(family)), ())
    tried = {size for size in wanted if size <= family.buckets[-1]} - set(family.refused)
    return msgspec.structs.replace(family, buckets=tuple(sorted({*family.buckets, *tried})))


def _kind(family: GraphFamily) -> tuple[str, int]:
    return family.run_mode, family.query_len


def _expected_cost(plan: GraphPlan, traffic: Traffic, offers: Sequence[StreamOffer]) -> float:
    families = plan.families
    cost = 0.0
    for family, weights, seconds in zip(
        families, weights_of(traffic, families), step_seconds(families, offers), strict=True
    ):
        costs = step_costs(family.buckets, seconds)
        cost += expected_cost(
            family.buckets, weights, dict(zip(family.buckets, costs, strict=True))
        )
    return cost
