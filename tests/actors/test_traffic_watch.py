"""Which watches over traffic there are, as groups come and go."""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.traffic_watch import TrafficWatches
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.planner import Planner
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
