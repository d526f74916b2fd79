"""A controller changes only to allowed states, even if two threads change its state at the same
time.
"""

from __future__ import annotations

import logging

import pytest

from dist_aclgraph.actors.controller.controller import Controller
from dist_aclgraph.actors.controller.state import State
from dist_aclgraph.actors.controller.term import Term
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.restarts import START_FACTOR
from tests.serve.conftest import CONFIG

TO_SERVING = (
    State.JOINING, State.LOADING, State.NEGOTIATING, State.CAPTURING, State.SERVING,
)  # fmt: skip


@pytest.fixture
def controller() -> Controller:
    controller = Controller(load_config(CONFIG), "test", Term(0, ""))
    for state in TO_SERVING:
        controller._enter(state)
    return controller


class ShutDownMeanwhile(logging.Handler):
    """Shuts the controller down at the moment when it logs that no group serves."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller

    def emit(self, record: logging.LogRecord) -> None:
        if "event=service_lost" in record.getMessage():
            self._controller.shut_down()


def test_a_controller_may_be_shut_down_while_it_sees_that_no_group_serves(
    controller: Controller,
) -> None:
    handler = ShutDownMeanwhile(controller)
    logger = logging.getLogger("dist_aclgraph.actors.controller.controller")
    logger.addHandler(handler)

    controller._see_service(False)
    logger.removeHandler(handler)

    assert controller.progress().state == State.STOPPED.value


@pytest.mark.parametrize("serves", [True, False])
def test_a_stopped_controller_ignores_the_states_of_groups(
    controller: Controller, serves: bool
) -> None:
    controller.shut_down()

    controller._see_service(serves)
    controller.shut_down()

    assert controller.progress().state == State.STOPPED.value


def test_the_next_controller_knows_how_slow_starts_are(controller: Controller) -> None:
    controller._start_limit.note(30.0)

    term = Term(0, "token", 16, num_groups=2).next(controller.handover())

    assert (term.number, term.token, term.max_model_len) == (1, "token", 16)
    following = Controller(load_config(CONFIG), "test", term)
    assert following._start_limit.seconds(600.0) == START_FACTOR * 30.0


def test_a_controller_without_groups_stops_without_draining(controller: Controller) -> None:
    controller._see_service(False)

    controller.shut_down()

    assert controller.progress().state == State.STOPPED.value
