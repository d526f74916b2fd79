"""No engine can delay the regular work of a deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.traffic_watch import ANSWER_S, TrafficWatch
from dist_aclgraph.actors.controller.upkeep import Demands
from dist_aclgraph.actors.engine.engine import SeenTraffic
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.traffic import Traffic
from tests.actors.leftovers import wait_until
from tests.deployments import forked_actor
from tests.serve.conftest import CONFIG

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

ASLEEP_S = 600.0
PERIOD_S = 60.0
NO_WORKERS: Any = None


class Engine:
    """An engine that answers at once. If it is stuck, it answers after ``ASLEEP_S``."""

    def __init__(self, *, is_stuck: bool) -> None:
        self._is_stuck = is_stuck
        self._asked = 0

    def demand(self) -> tuple[int, int]:
        if self._is_stuck:
            time.sleep(ASLEEP_S)
        self._asked += 1
        return 3, 4

    def take_traffic(self) -> SeenTraffic:
        self.demand()
        return SeenTraffic(None, Traffic(), {})

    def asked(self) -> int:
        return self._asked


MakeGroups = Callable[..., list[LockstepGroup]]


@pytest.fixture
def make_groups() -> Iterator[MakeGroups]:
    actor = forked_actor(Engine)
    planner = Planner.from_config(load_config(CONFIG, {"graph.rebucket_s": PERIOD_S}))
    started: list[Any] = []

    def make(*are_stuck: bool) -> list[LockstepGroup]:
        started.extend(actor.remote(is_stuck=each) for each in are_stuck)
        ray.get([engine.asked.remote() for engine in started], timeout=120)
        return [
            LockstepGroup(
                NO_WORKERS, planner, engine=engine, number=number, state=GroupState.SERVING
            )
            for number, engine in enumerate(started)
        ]

    yield make
    for engine in started:
        ray.kill(engine)


def test_demands_are_known_of_those_that_answer(make_groups: MakeGroups) -> None:
    groups, demands = make_groups(False, True, False), Demands()

    wait_until(lambda: demands.look(groups) == (6, 8), "an engine that hangs holds up the others")

    assert demands.look(groups[:1]) == (3, 4)
    assert demands.look([]) == (0, 0)


@pytest.mark.slow
def test_traffic_is_collected_from_the_engines_that_answer(make_groups: MakeGroups) -> None:
    groups = make_groups(False, True)
    watch, quick = TrafficWatch(groups[0].planner, groups), groups[0].engine
    now_s = time.monotonic()

    for turn in range(1, 4):
        watch.look(now_s + 2 * turn * PERIOD_S)
        wait_until(lambda turn=turn: ray.get(quick.asked.remote()) == turn, "nobody asks")
        watch.look(now_s + 2 * turn * PERIOD_S)
        watch.look(now_s + 2 * turn * PERIOD_S + ANSWER_S)
