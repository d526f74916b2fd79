"""When a group is added, its traffic watch is added; when a group is removed, its traffic watch is
removed.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.traffic_watch import TrafficWatch, TrafficWatches
from dist_aclgraph.actors.engine.engine import SeenTraffic
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.traffic import Traffic
from tests.plans import make_plan
from tests.serve.conftest import CONFIG

NO_WORKERS: Any = None


def make_planner(scope: str) -> Planner:
    return Planner.from_config(load_config(CONFIG, {"graph.scope": scope}))


@pytest.mark.parametrize(("scope", "most"), [("group", 2), ("cluster", 1)])
def test_watches_go_with_their_groups(scope: str, most: int) -> None:
    watches, planner = TrafficWatches(), make_planner(scope)
    kept = LockstepGroup(NO_WORKERS, planner)
    watches.add([kept])
    for _ in range(50):
        group = LockstepGroup(NO_WORKERS, planner)
        watches.add([group])
        assert len(watches) == most
        watches.remove(group)

    assert len(watches) == 1
    watches.remove(kept)
    assert len(watches) == 0


def test_a_configuration_that_was_replaced_is_watched_no_more() -> None:
    watches = TrafficWatches()
    for _ in range(20):
        group = LockstepGroup(NO_WORKERS, make_planner("cluster"))
        watches.add([group])
        watches.remove(group)

    assert len(watches) == 0


def seen(plan: GraphPlan | None) -> SeenTraffic:
    return SeenTraffic(plan, Traffic(decode={3: 1e4}), {})


def test_no_plan_is_changed_while_a_group_is_still_changing_its_own() -> None:
    planner, plan = Mock(config=load_config(CONFIG)), make_plan(1, 8, 32)
    planner.choose_again.return_value = (make_plan(1, 3, 32, version=2), ())
    groups = [
        LockstepGroup(NO_WORKERS, planner, engine=Mock(), state=GroupState.SERVING)
        for _ in range(2)
    ]
    watch = TrafficWatch(planner, groups)

    for states in ((plan, None), (None, plan), (plan, plan)):
        told = [group.engine.change_plan.remote for group in groups]
        assert not any(each.called for each in told)
        watch._choose(list(zip(groups, map(seen, states), strict=True)), 2, time.monotonic())

    assert all(each.called for each in told)
