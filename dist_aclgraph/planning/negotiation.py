"""Chooses, from the resources that all ranks offer for graphs, one set of graphs that every rank
can capture. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np

from dist_aclgraph.errors import GraphError, StreamBudgetError
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget import (
    BudgetModel,
    Limit,
    StreamOffer,
    share_cards,
    total,
)
from dist_aclgraph.planning.choice import Choices, choices, step_costs
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import Traffic, weights_of

__all__ = [
    "RankLimit",
    "StreamOffer",
    "fit_memory",
    "keep_room",
    "negotiate",
    "step_seconds",
    "tightest_limits",
]

LATER_SHARE = 4  # at most a quarter of a rank's streams is reserved for lazy graphs
# an error message names at most 8 ranks, and says how many others there are
NAMED_RANKS = 8


@dataclass(frozen=True)
class RankLimit:
    """A limit on the number of buckets, and the owner of the limit.

    ``owner`` names the rank with this limit, or the group if the limit is the same for all ranks.
    """

    limit: Limit
    owner: str


def negotiate(
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
    *,
    traffic: Traffic | None = None,
    version: int = 1,
    max_num_seqs: int = 0,
) -> GraphPlan:
    """Choose buckets that every rank can capture. Of all possible sets, choose the set with the
    lowest cost for the traffic.

    All ranks use the same plan. A collective in a graph works only if all ranks of its group replay
    this graph. The order of the offers does not change the plan. The plan obeys all limits that the
    budget model returns for the ranks. If a family has a bucket in the plan, the family's largest
    bucket that fits in memory is also in the plan. Units: streams and bytes.

    Args:
        families: the families of graphs, with all sizes that may be captured; empty if the
            workload's mode is NONE.
        traffic: the frequency of each batch size. None means assumed frequencies, in which small
            sizes occur most often.

    Raises:
        GraphError: there are no offers or no sizes, or two offers come from the same rank.
        StreamBudgetError: not even one bucket fits. The message lists, for each rank, its offer and
            the bucket's cost.
    """
    offers = sorted(offers, key=lambda offer: offer.rank)
    if not offers or len({offer.rank for offer in offers}) < len(offers):
        raise GraphError(f"need one offer of each rank, got {[offer.rank for offer in offers]}")
    offers = share_cards(offers)

    mode = budget_model.workload.mode

    def plan(chosen: Sequence[GraphFamily], reasons: Sequence[str]) -> GraphPlan:
        return GraphPlan(
            version=version,
            mode=mode,
            families=tuple(chosen),
            max_num_seqs=max_num_seqs,
            budget_model=budget_model.name,
            reasons=tuple(reasons),
        )

    if mode == "NONE":
        return plan((), ["graph.mode is NONE"])
    if not families or not all(family.buckets for family in families):
        raise GraphError("there are no candidate sizes to choose from")
    fitting, reasons = fit_memory(families, offers, budget_model)
    if not fitting:
        raise StreamBudgetError(
            f"{'; '.join(reasons)}; lower kv.memory_fraction, or set graph.mode to NONE"
        )
    limits = tightest_limits(offers, fitting, budget_model)
    seconds = step_seconds(fitting, offers)
    menus = [
        _menu(family, weights, seconds[index], limits, index)
        for index, (family, weights) in enumerate(
            zip(fitting, weights_of(traffic, fitting), strict=True)
        )
    ]
    counts = _cheapest([item.limit for item in limits], menus)
    if not any(counts):
        raise StreamBudgetError(_shortfalls(offers, fitting, budget_model))
    for index, family in enumerate(fitting):
        reasons.append(_why(index, family, counts, limits, budget_model))
    chosen = [
        msgspec.structs.replace(family, buckets=menu.choices.buckets(count))
        for family, menu, count in zip(fitting, menus, counts, strict=True)
    ]
    return plan([family for family in chosen if family.buckets], reasons)


def keep_room(
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    capacity: int,
    budget_model: BudgetModel,
) -> tuple[list[StreamOffer], int]:
    """Reserve streams for lazy graphs. Return the offers without these streams, and the number of
    lazy graphs.

    The number is at most ``capacity``. The number is also limited so that lazy graphs need at most
    a quarter of the streams of any rank.
    """
    if not families:
        return list(offers), 0
    prices = [[total(budget_model.price(family, offer)) for family in families] for offer in offers]
    for price, shared in zip(prices, share_cards(offers), strict=True):
        if dearest := max(price):
            capacity = min(capacity, shared.usable // LATER_SHARE // dearest)
    kept = [
        msgspec.structs.replace(offer, reserve=offer.reserve + capacity * max(price))
        for offer, price in zip(offers, prices, strict=True)
    ]
    return kept, capacity


def tightest_limits(
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
) -> list[RankLimit]:
    """Return the limits of all ranks. If several limits have equal prices, only the smallest of
    these limits is returned.
    """
    found: dict[tuple[str, tuple[int, ...]], RankLimit] = {}
    for offer in offers:
        for limit in budget_model.limits(families, offer):
            key = (limit.what, limit.prices)
            if key not in found or limit.amount < found[key].limit.amount:
                found[key] = RankLimit(limit, f"rank {offer.rank}")
    return [*found.values(), *_proven_limits(families)]


def _proven_limits(families: Sequence[GraphFamily]) -> Iterator[RankLimit]:
    """Yield a limit for each family whose number of buckets is limited because a capture failed."""
    for index, family in enumerate(families):
        if family.max_buckets is not None:
            prices = tuple(int(i == index) for i in range(len(families)))
            limit = Limit(f"{family.name} graphs after a failure", family.max_buckets, prices)
            yield RankLimit(limit, "the group")


def step_seconds(
    families: Sequence[GraphFamily], offers: Sequence[StreamOffer]
) -> list[dict[int, float]]:
    """Return, for each family and each of its buckets, how many seconds a step takes on the slowest
    rank.

    If the steps of one family were not timed, the results of all families are empty, because costs
    in seconds cannot be added to costs in tokens.
    """
    found: list[dict[int, float]] = [{} for _ in families]
    for family, seconds in zip(families, found, strict=True):
        for probe in (probe for offer in offers for probe in offer.probes_of(family)):
            if probe.replay_s:
                size = probe.graph.num_tokens
                seconds[size] = max(seconds.get(size, 0.0), probe.replay_s)
    return found if all(found) else [{} for _ in families]


@dataclass(frozen=True)
class _Menu:
    """For one family: the best set of buckets for each number of buckets, and the sum of the
    weights of the family's batches.
    """

    choices: Choices
    weight: float


def _menu(
    family: GraphFamily,
    weights: Mapping[int, float],
    seconds: Mapping[int, float],
    limits: Sequence[RankLimit],
    index: int,
) -> _Menu:
    alone = [most for item in limits if (most := item.limit.most(index)) is not None]
    count = min([len(family.buckets), *alone])
    costs = step_costs(family.buckets, seconds)
    found = choices(family.buckets, weights, costs, count)
    return _Menu(found, sum(weights.values()))


def _cheapest(limits: Sequence[Limit], menus: Sequence[_Menu]) -> tuple[int, ...]:
    """Return how many buckets each family gets. The returned combination is the best of all
    combinations that obey the limits.

    The batches of a family without a bucket run eagerly. Eager batches cost more time than better
    buckets of other families can save. So combinations are compared first by the number of families
    without a bucket, then by the weight of these families, then by expected cost, then by the
    number of buckets.
    """

    def key(counts: tuple[int, ...]) -> tuple[int, float, float, int]:
        pairs = list(zip(menus, counts, strict=True))
        empty = [menu.weight for menu, count in pairs if not count]
        cost = sum(float(menu.choices.costs[count]) for menu, count in pairs if count)
        return len(empty), sum(empty), cost, sum(counts)

    best = min(_maximal(limits, [len(menu.choices.costs) - 1 for menu in menus]), key=key)
    return tuple(int(menu.choices.counts[count]) for menu, count in zip(menus, best, strict=True))


def _maximal(limits: Sequence[Limit], most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield combinations of numbers of buckets that obey all limits. In each combination, the last
    family gets as many buckets as the limits allow.
    """
    *head, last = most
    for counts in product(*(range(n + 1) for n in head)):
        left = [
            limit.amount - int(np.dot(limit.prices[:-1], counts)) if counts else limit.amount
            for limit in limits
        ]
        if any(amount < 0 for amount in left):
            continue
        rest = [
            amount // limit.prices[-1]
            for limit, amount in zip(limits, left, strict=True)
            if limit.prices[-1]
        ]
        yield (*counts, min([last, *rest]))


def fit_memory(
    families: Sequence[GraphFamily],
    offers: Sequence[StreamOffer],
    budget_model: BudgetModel,
) -> tuple[list[GraphFamily], list[str]]:
    """Remove each size for which at least one rank offers too little memory. Return the families
    without these sizes, and the reasons for removing them.
    """
    fitting, reasons, lacking = [], [], []
    for family in families:
        room = [_room(family, offer, budget_model) for offer in offers]
        tokens, poorest = min(zip(room, offers, strict=True), key=lambda pair: pair[0])
        buckets = tuple(bucket for bucket in family.buckets if bucket <= tokens)
        have = f"{poorest.free_bytes} bytes of rank {poorest.rank}"
        if not buckets:
            each = budget_model.bytes_per_token(family, poorest)
            need = math.ceil(family.buckets[0] * each)
            lacking.append(
                f"{family.name}: rank {poorest.rank} offers {poorest.free_bytes} bytes; the "
                f"smallest bucket ({family.buckets[0]} tokens) costs {need}, "
                f"{need - poorest.free_bytes} too many"
            )
            continue
        if len(buckets) < len(family.buckets):
            reasons.append(f"{family.name} sizes above {buckets[-1]} need more than the {have}")
        fitting.append(msgspec.structs.replace(family, buckets=buckets))
    return fitting, [*lacking, *reasons]


def _room(family: GraphFamily, offer: StreamOffer, budget_model: BudgetModel) -> float:
    """Return the size of the largest bucket that fits in a rank's memory. The result can be
    infinite.
    """
    each = budget_model.bytes_per_token(family, offer)
    return offer.free_bytes / each if each else math.inf


def _why(
    index: int,
    family: GraphFamily,
    counts: Sequence[int],
    limits: Sequence[RankLimit],
    budget_model: BudgetModel,
) -> str:
    """Return a sentence that says why a family has this number of buckets."""
    count, wanted = counts[index], len(family.buckets)
    if count == wanted:
        return f"all {wanted} {family.name} sizes fit"
    more = [n + (i == index) for i, n in enumerate(counts)]
    tight = next((item for item in limits if not item.limit.admits(more)), None)
    if tight is None:
        return f"{count} of {wanted} {family.name} sizes serve the traffic as well as all"
    return (
        f"{tight.owner} affords {count} of {wanted} {family.name} sizes by "
        f"{budget_model.name}, having {tight.limit.amount} {tight.limit.what}"
    )


def _shortfalls(
    offers: Sequence[StreamOffer],
    families: Sequence[GraphFamily],
    budget_model: BudgetModel,
) -> str:
    """Return an error message that names the ranks that can capture no bucket, and the cost of a
    bucket.
    """
    lines = []
    for offer in offers:
        limits = budget_model.limits(families, offer)
        lacks = [
            f"one {family.name} bucket needs {limit.prices[i]} of {limit.amount} {limit.what}"
            for i, family in enumerate(families)
            for limit in limits
            if limit.most(i) == 0
        ]
        if any(all(limit.most(i) != 0 for limit in limits) for i in range(len(families))):
            continue
        lines.append(
            f"rank {offer.rank} offers {offer.usable} streams ({offer.available} available, "
            f"{offer.reserve} in reserve): {', '.join(lacks)}"
        )
    others = len(lines) - NAMED_RANKS
    if others > 0:
        lines[NAMED_RANKS:] = [f"and {others} other ranks"]
    return (
        f"not even one bucket fits by {budget_model.name}: {'; '.join(lines)}; lower "
        "graph.reserve_streams, or set graph.mode to NONE"
    )
