"""Makes graph plans for random numbers of free streams on one rank. Compares each plan with the
number of streams that the device counts.

This program runs in a separate process, because the emulator's settings cannot change in a process:
``python -m tests.actors.random_budgets CHECKPOINT ACCOUNTING SEED ROUNDS``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.capture.lockstep_capture import capture_plan, probe_graphs
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import CaptureError, StreamBudgetError
from dist_aclgraph.planning.buckets import GraphFamily, asked_sizes, candidate_families
from dist_aclgraph.planning.budget import Workload, make_budget_model, total
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.negotiation import negotiate
from dist_aclgraph.planning.plan import CaptureFailure, GraphPlan
from dist_aclgraph.shapes.model_facts import read_model_facts
from tests.actors.local_ranks import LocalRanks, make_local_config, start_rank
from tests.streams import HeldStreams, ids_left

STREAMS = 120  # number of stream ids of the device; the rank itself uses some of these ids
MOST_FREE = 24
MODES = ("FULL_DECODE_ONLY", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
MODELS = {
    "pinned": ("cann-pinned", "calibrated"),
    "software_sq": ("cann-pinned", "calibrated", "cann-software-sq"),
}
MAX_NUM_SEQS = 12


def make_round(base: Config, mode: str, model: str, chosen: random.Random) -> Config:
    decode = sorted(chosen.sample(range(1, MAX_NUM_SEQS + 1), chosen.randint(4, MAX_NUM_SEQS)))
    mixed = sorted(chosen.sample(range(1, 64), chosen.randint(3, 14)))
    graph = {
        "mode": mode,
        **asked_sizes(mode, decode, mixed),
        "budget_model": model,
        "reserve_streams": chosen.choice([0, 0, 3]),
    }
    return make_config({**msgspec.to_builtins(base.model_dump()), "graph": graph})


def play(ranks: LocalRanks, config: Config, free: int) -> str:
    """Negotiate and capture a plan while the device has ``free`` unused stream ids; return the
    outcome in one word.

    The function checks three laws. If the budget model counts streams, all buckets of the plan are
    captured. If the plan has fewer buckets of a family than requested, no further bucket of this
    family fits. After the release of all graphs, all streams are free again.
    """
    workload = Workload.from_config(config, read_model_facts(config.model))
    model = make_budget_model(config.graph.budget_model, workload)
    reserve = config.graph.reserve_streams
    families = candidate_families(config)
    transaction = GraphTransaction(ranks, 1.0, 1.0)
    (worker,) = ranks.workers
    with HeldStreams(free):
        offers = [msgspec.structs.replace(worker.offer(), reserve=reserve)]
        assert offers[0].available == free
        if model.name == "calibrated":
            largest = [family.describe(family.buckets[-1], MAX_NUM_SEQS) for family in families]
            offers = probe_graphs(transaction, largest, offers)
        cheapest = min(total(make_budget_model("cann-pinned", workload).price(f, offers[0]))
                       for f in families)  # fmt: skip
        try:
            plan = negotiate(offers, families, model, max_num_seqs=MAX_NUM_SEQS)
            ledgers = [Ledger.predict(offer, plan, model) for offer in offers]
            record = capture_plan(transaction, plan, ledgers, lambda record, graph: None)
        except (StreamBudgetError, CaptureError):
            assert free - reserve < cheapest
            assert ids_left() == free
            return "none"
        try:
            assert record.plan == plan, record.rollbacks
            assert ids_left() >= reserve
            if offers[0].counts_graphs:
                ledgers[0].measure("graph pool", worker.pool_bytes(), "bytes")
                assert ledgers[0].warnings() == []
                assert all(entry.measured is not None for entry in ledgers[0].entries)
            return check_one_more(transaction, families, record.plan, reserve)
        finally:
            transaction.release(record.plan.capture_order)
            assert ids_left() == free


def check_one_more(
    transaction: GraphTransaction,
    families: tuple[GraphFamily, ...],
    plan: GraphPlan,
    reserve: int,
) -> str:
    """Try to capture one more bucket of each family of which the plan has fewer buckets than
    requested.
    """
    kept = {family.name: family.buckets for family in plan.families}
    short = "failed" in plan.reasons[-1]
    found = "all"
    for family in families:
        left = set(family.buckets) - set(kept.get(family.name, ()))
        is_short = short or any(f"of {len(family.buckets)} {family.name} sizes by" in reason
                                for reason in plan.reasons)  # fmt: skip
        if not left or not is_short:
            continue
        graph = family.describe(min(left), MAX_NUM_SEQS)
        outcome = transaction.capture(graph)
        if isinstance(outcome, CaptureFailure):
            assert outcome.cause == "streams", outcome
        else:
            assert ids_left() < reserve, (graph, plan, ids_left())
            transaction.release([graph])
        found = "cut"
    return found


def main(checkpoint: str, accounting: Any, seed: str, rounds: str) -> None:
    base = make_local_config(Path(checkpoint), accounting=accounting, streams=STREAMS)
    largest = [
        family.describe(family.buckets[-1], MAX_NUM_SEQS)
        for mode in ("FULL", "FULL_AND_PIECEWISE")
        for family in candidate_families(
            make_config({**base.model_dump(), "graph": {"mode": mode}})
        )
    ]
    ranks = LocalRanks([start_rank(base, 0, largest)])
    for graph in largest:
        (answer,) = ranks.carry_out("prepare", 1.0, graph)
        assert answer.failure is None, answer.message
    chosen = random.Random(int(seed))
    for index in range(int(rounds)):
        model = MODELS[accounting][index % len(MODELS[accounting])]
        mode = chosen.choice(MODES)
        free = chosen.randint(1, MOST_FREE)
        config = make_round(base, mode, model, chosen)
        print(index, mode, model, free, config.graph.reserve_streams, flush=True)
        print(index, play(ranks, config, free), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
