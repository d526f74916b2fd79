"""Captures a plan in lockstep: the largest graph first, each graph on all ranks or on no rank.

A graph whose capture fails on one rank is undone on all ranks. Then the graphs for which a rank
does not have enough resources are removed from the plan. Every rank adopts the new plan before the
next capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.errors import CaptureError
from dist_aclgraph.planning.budget import BucketProbe, StreamOffer
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.plan import (
    CaptureCost,
    CaptureFailure,
    GiveUp,
    GraphPlan,
    decide_after_failure,
)

logger = logging.getLogger(__name__)


@dataclass
class CaptureRecord:
    """The result of capturing a plan.

    Attributes:
        costs: each graph's highest cost on any rank.
        rollbacks: messages about captures that were undone.
    """

    plan: GraphPlan
    costs: dict[BatchDescriptor, CaptureCost] = field(default_factory=dict)
    rollbacks: list[str] = field(default_factory=list)


# A function that is called before each capture, and once after the last capture. Its arguments are
# the record so far, and the graph that will be captured next (None after the last capture).
OnCapture = Callable[[CaptureRecord, BatchDescriptor | None], None]


def capture_plan(
    transaction: GraphTransaction, plan: GraphPlan, ledgers: list[Ledger], on_graph: OnCapture
) -> CaptureRecord:
    """Capture all graphs of ``plan``. If a capture fails, continue with a smaller plan.

    Args:
        ledgers: the ledgers of all ranks. The cost of each captured graph is written to the
            ledgers.

    Raises:
        CaptureError: no graph can be captured; the message names rank, graph and remedy.
        WorkerError: a rank died or hung, or its operators differed from another rank's.
    """
    _adopt(transaction, plan, ledgers)
    record = CaptureRecord(plan)
    while left := [g for g in record.plan.capture_order if g not in record.costs]:
        graph = left[0]
        on_graph(record, graph)
        outcome = transaction.capture(graph)
        if isinstance(outcome, CaptureFailure):
            _shrink(transaction, record, outcome, ledgers)
            continue
        record.costs[graph] = cost_of(graph, outcome)
        for ledger, cost in zip(ledgers, outcome, strict=True):
            ledger.measure(str(graph), cost.streams)
    on_graph(record, None)
    return record


def agree(
    records: Sequence[CaptureRecord], capture_again: Callable[[int, GraphPlan], CaptureRecord]
) -> None:
    """Make all groups use the same plan. A group releases the graphs that another group does not
    have.

    If a group cannot capture the common plan, the plans of all groups are compared again. This
    repetition ends, because the plan becomes smaller each time.

    Args:
        records: the capture record of each group.
        capture_again: a function that lets one group capture a new plan instead of its old plan.
            Its first argument is the index of the group in ``records``.
    """
    left = list(records)
    while True:
        plan = min((record.plan for record in left), key=lambda plan: plan.num_graphs)
        others = [index for index, record in enumerate(left) if record.plan != plan]
        if not others:
            return
        for index in others:
            left[index] = capture_again(index, plan)


def probe_graphs(
    transaction: GraphTransaction, graphs: Iterable[BatchDescriptor], offers: Sequence[StreamOffer]
) -> list[StreamOffer]:
    """Capture each graph, measure its cost on each rank, and release the graph. Return the offer of
    each rank, with the costs that the rank measured.

    If a graph cannot be captured, the offers contain no cost of this graph.
    """
    probed = list(offers)
    for graph in graphs:
        outcome = transaction.capture(graph)
        if isinstance(outcome, CaptureFailure):
            continue
        transaction.release([graph])
        probed = [
            offer.with_probe(BucketProbe(graph=graph, streams=cost.streams, bytes=cost.bytes))
            for offer, cost in zip(probed, outcome, strict=True)
        ]
    return probed


def cost_of(graph: BatchDescriptor, costs: list[CaptureCost]) -> CaptureCost:
    """Return the cost of a graph on the rank where the cost is highest. Warn if the graph contains
    AI CPU operators.

    Only the operators of one rank are checked, because all ranks have the same kind of chip and
    have recorded the same operators.
    """
    most = CaptureCost(
        streams=max(cost.streams for cost in costs),
        bytes=max(cost.bytes for cost in costs),
        seconds=max(cost.seconds for cost in costs),
        digest=costs[0].digest,
        ai_cpu=costs[0].ai_cpu,
    )
    if warning := most.ai_cpu_warning(graph):
        logger.warning(warning)
    return most


def _adopt(transaction: GraphTransaction, plan: GraphPlan, ledgers: list[Ledger]) -> None:
    transaction.adopt(plan)
    for ledger in ledgers:
        ledger.keep(plan)


def _shrink(
    transaction: GraphTransaction,
    record: CaptureRecord,
    failure: CaptureFailure,
    ledgers: list[Ledger],
) -> None:
    graph = failure.graph
    decision = decide_after_failure(record.plan, failure)
    if isinstance(decision, GiveUp):
        raise CaptureError(f"capture of {graph}: {decision.reason}")
    record.plan = decision.plan
    record.rollbacks.append(failure.undone)
    surplus = set(record.costs) - set(record.plan.capture_order)
    transaction.release(surplus)
    for dropped in surplus:
        del record.costs[dropped]
    _adopt(transaction, record.plan, ledgers)
