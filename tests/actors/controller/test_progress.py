"""Users see a controller's progress during a start, even if the controller answers late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.deployment.controller_life import progress_of
from tests.deployments import forked_actor

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

WORK_S = 1.0


class Controller:
    """A controller whose start takes a while. Each of its reports comes after a delay."""

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s

    def progress(self) -> Progress:
        time.sleep(self._answer_s)
        return Progress("LOADING", 1, 2)

    def start(self) -> str:
        time.sleep(WORK_S)
        return "done"

    def die(self) -> None:
        time.sleep(WORK_S)
        ray.actor.exit_actor()


def make_controller(answer_s: float = 0.0) -> Any:
    return forked_actor(Controller, max_concurrency=8).remote(answer_s)


@pytest.fixture
def silent() -> Iterator[Any]:
    controller = make_controller(answer_s=100.0)
    yield controller
    ray.kill(controller)


def test_the_answers_of_a_controller_are_shown_until_its_work_is_over() -> None:
    controller = make_controller()
    work = controller.start.remote()

    shown = [progress for progress in progress_of(controller, work) if progress is not None]

    assert set(shown) == {Progress("LOADING", 1, 2)}
    assert ray.get(work) == "done"


@pytest.mark.slow
def test_a_controller_that_does_not_say_how_far_it_is_still_ends_its_work(silent: Any) -> None:
    work = silent.start.remote()

    assert set(progress_of(silent, work)) == {None}
    assert ray.get(work) == "done"


def test_the_running_call_reports_the_death_of_its_controller() -> None:
    controller = make_controller()
    work = controller.die.remote()

    list(progress_of(controller, work))

    with pytest.raises(RayActorError):
        ray.get(work)
