"""If a controller dies, another controller is started, even if the first attempts to start it fail.
If no controller can be started, the end of the deployment is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.controller.term import Handover
from dist_aclgraph.actors.deployment.controller_life import ControllerKeeper
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import Config, load_config
from tests.actors.leftovers import wait_until
from tests.deployments import forked_actor
from tests.serve.conftest import CONFIG

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

NAME = "test-controller-life"
LIMIT_S = 180.0


class Controller:
    """A controller that is ready as soon as it has started."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> Reach:
        return Reach([], "token", 16, "node")

    def pid(self) -> int:
        return os.getpid()

    def handover(self) -> Handover:
        return Handover(self._config, 1)

    def progress(self) -> Progress:
        return Progress("PLACING")


class FullDisk:
    """Starts controllers; the first ``num_failures`` starts fail."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    def make(self, config: Config, *others: Any) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(28, "No space left on device")
        return forked_actor(Controller).remote(config)


@pytest.fixture
def keep() -> Iterator[Callable[[FullDisk], ControllerKeeper]]:
    keepers: list[ControllerKeeper] = []

    def make(disk: FullDisk) -> ControllerKeeper:
        config = load_config(CONFIG, {"recovery.restarts_per_hour": 2})
        first = FullDisk(0).make(config)
        reach = ray.get(first.start.remote(), timeout=120)
        keepers.append(ControllerKeeper(first, NAME, config, reach, make=disk.make))
        ray.kill(first)
        return keepers[-1]

    yield make
    for keeper in keepers:
        keeper.stop()
        keeper.end_by_force()


@pytest.mark.slow
def test_a_start_that_the_system_refuses_is_tried_again(
    keep: Callable[[FullDisk], ControllerKeeper],
) -> None:
    keeper = keep(FullDisk(num_failures=1))
    first = keeper.controller

    wait_until(
        lambda: keeper.controller != first and not keeper.progress, "no other one serves", LIMIT_S
    )

    assert ray.get(keeper.controller.handover.remote(), timeout=120).num_groups == 1
    assert not keeper.failure


@pytest.mark.slow
def test_starts_that_the_system_refuses_again_and_again_end_with_the_reason(
    keep: Callable[[FullDisk], ControllerKeeper],
) -> None:
    keeper = keep(FullDisk(num_failures=99))

    wait_until(lambda: bool(keeper.failure), "it recovers for ever", LIMIT_S)

    assert "No space left on device" in keeper.failure
    assert "recovery.restarts_per_hour allows 2" in keeper.failure
