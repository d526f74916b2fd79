"""Dispatches the batches of a finished simulation again, with other sets of graphs.

In reality, other graphs would change the times of steps, and therefore the batches. This effect is
ignored: the batches are the same for all sets of graphs. The first row of the result belongs to the
finished simulation, in which the set of graphs could change. In all other rows, the set stays the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from dist_aclgraph.config import GraphMode
from dist_aclgraph.planning.buckets import GraphFamily, candidate_families, trim_sizes
from dist_aclgraph.planning.budget import StreamOffer
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import NegotiatedPlan
from dist_aclgraph.simulate.deployment import AssumedDeployment, distinct
from dist_aclgraph.simulate.group import SimulatedGroup
from dist_aclgraph.simulate.streams import is_affordable, streams_held
from dist_aclgraph.simulate.tally import replay_batches

AS_SIMULATED = "as simulated"
OTHER_MODES: tuple[GraphMode, ...] = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def compare(
    deployment: AssumedDeployment, group: SimulatedGroup, negotiated: NegotiatedPlan
) -> list[dict[str, Any]]:
    """Return one row for each set of graphs. A row contains padding, eager steps and streams.

    In a row, ``is_affordable`` says whether the ranks could capture all graphs of the set.
    ``usable`` is the number of usable streams on the rank with the fewest usable streams.
    """
    rows = [
        {
            "name": AS_SIMULATED,
            "buckets": len(group.dispatcher.graphs),
            "streams": group.most_streams["all"],
            "is_affordable": True,
            "usable": group.tightest.usable,
            **group.tally.all.report(),
        }
    ]
    for name, planned, kept, plan in _plans(deployment, negotiated):
        dispatcher = GraphDispatcher(plan)
        offers = distinct(kept)
        rows.append(
            {
                "name": name,
                "buckets": plan.num_graphs,
                "streams": streams_held(planned, group.tightest)(dispatcher.graphs)["all"],
                "is_affordable": all(is_affordable(planned, offer, plan) for offer in offers),
                "usable": min(offer.usable for offer in offers),
                **replay_batches(group.tally.by_batch, dispatcher).report(),
            }
        )
    return rows


def powers_of_two(family: GraphFamily, count: int) -> tuple[int, ...]:
    """Return the buckets for 1, 2, 4, ... requests, and the family's largest bucket."""
    largest, unit = family.buckets[-1], family.query_len or 1
    sizes = {unit << i for i in range((largest // unit).bit_length())}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


SETS: dict[str, Callable[[GraphFamily, int], tuple[int, ...]]] = {
    "all sizes": lambda family, count: family.buckets,
    "as many, evenly by index": lambda family, count: tuple(trim_sizes(family.buckets, count)),
    "powers of two": powers_of_two,
}


def _plans(
    deployment: AssumedDeployment, negotiated: NegotiatedPlan
) -> Iterator[tuple[str, AssumedDeployment, Sequence[StreamOffer], GraphPlan]]:
    chosen = negotiated.plan
    offers = negotiated.offers
    yield "first plan, held", deployment, offers, chosen
    candidates = candidate_families(deployment.config)
    counts = {family.name: len(family.buckets) for family in chosen.families}
    for name, sizes in SETS.items():
        families = tuple(
            msgspec.structs.replace(family, buckets=sizes(family, counts[family.name]))
            for family in candidates
            if family.name in counts
        )
        yield name, deployment, offers, msgspec.structs.replace(chosen, families=families)
    for mode in OTHER_MODES:
        other = deployment.with_mode(mode)
        if other.config.graph.mode == mode != deployment.config.graph.mode:
            # These offers come from the ranks of ``offers``. In these offers, streams are reserved
            # for the lazy graphs of ``mode``.
            asked = [other.offers[offer.rank] for offer in distinct(offers)]
            found = other.planner.negotiate(asked)
            yield f"{mode}, held", other, found.offers, found.plan
