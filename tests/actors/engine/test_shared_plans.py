"""All groups use the same plan. If a group has captured graphs that this plan does not contain, the
group releases these graphs.
"""

from __future__ import annotations

from typing import Any, cast

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.startup import Startup
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.budget import StreamOffer
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit
from tests.actors.fakes import FakeRanks
from tests.plans import make_plan
from tests.serve.conftest import CONFIG


class Workers(FakeRanks):
    """Workers that report the streams of their graphs."""

    def call(self, method: str, *args: Any) -> list[int]:
        assert method == "pool_bytes"
        return [0] * len(self.ranks)


def test_a_group_that_captures_a_smaller_plan_keeps_no_graph_of_the_larger_one() -> None:
    planner = Planner.from_config(load_config(CONFIG))
    workers = Workers()
    offers = [StreamOffer(rank=rank, available=100) for rank in workers.ranks]
    ledgers = [
        Ledger(rank=rank, offered_streams=100, offered_bytes=0, entries=[])
        for rank in workers.ranks
    ]
    group = LockstepGroup(cast(WorkerGroup, workers), planner, offers=offers, ledgers=ledgers)
    startup = Startup(
        planner,
        [group],
        ProcessStarter(),
        StartLimit(),
        lambda phase: None,
        lambda *progress: None,
    )
    larger, smaller = make_plan(1, 2, 4, 8), make_plan(1, 8, version=2)

    for plan in (larger, smaller):
        group.record = startup._capture(group, plan)
        assert_all_hold(workers, plan)


def assert_all_hold(workers: Workers, plan: GraphPlan) -> None:
    for state in workers.states:
        assert state.plan == plan
        assert state.captured == state.committed == set(plan.capture_order)
