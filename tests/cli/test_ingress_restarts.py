"""The supervisor replaces ingresses that die. The number of restarts is limited. If an ingress dies
before it has served, its replacement counts as a restart, and begins only after a pause.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from dist_aclgraph.actors.host.liveness import SharedHeartbeat
from dist_aclgraph.cli import ingress
from dist_aclgraph.cli.supervise import CRASHED, SETTLED_S, Supervisor
from dist_aclgraph.planning.restarts import FIRST_PAUSE_S, RestartBudget
from dist_aclgraph.serve.http.front import Front


def test_ingresses_that_live_for_long_between_their_deaths_come_back_without_longer_pauses() -> (
    None
):
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(100), 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].began_s = time.monotonic() - 2 * SETTLED_S

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert supervisor._ingresses[0].due_s <= time.monotonic() + FIRST_PAUSE_S


def test_ingresses_that_die_at_their_start_come_back_after_longer_and_longer_pauses() -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(100), 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].began_s = time.monotonic()

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert supervisor._ingresses[0].due_s > time.monotonic() + 2 * FIRST_PAUSE_S


def test_an_ingress_that_has_served_is_replaced_however_often_it_dies() -> None:
    restarts = RestartBudget(2)
    supervisor = Supervisor(Mock(), [Mock()], restarts, 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].heartbeat.begin()
        supervisor._ingresses[0].heartbeat.beat()

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert restarts.num_left(time.monotonic()) == 2, "these restarts are the owner's"


def test_an_ingress_that_only_listens_uses_the_budget() -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(2), 60.0, 60.0)
    codes = []
    for _ in range(3):
        supervisor._ingresses[0].heartbeat.begin()
        supervisor._ingresses[0].heartbeat.beat(serves=False)
        codes.append(supervisor._replace_ingress(supervisor._ingresses[0], CRASHED))

    assert codes == [None, None, 1]


def test_an_ingress_serves_only_after_its_api_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = SharedHeartbeat(60.0)
    heartbeat.begin()
    seen = []

    class Server:
        def __init__(self, limits: Any, listener: Any, beat: Callable[[], None], _: Any) -> None:
            self._beat = beat

        def start(self, front: Front) -> None:
            self._front = front
            self._beat()

        def stop(self) -> None:
            seen.append(heartbeat.has_served)
            self._front.open(Mock())
            self._beat()

    monkeypatch.setattr(ingress, "HttpServer", Server)
    monkeypatch.setattr(ingress, "OwnerClient", Mock())
    monkeypatch.setattr(ingress, "_wait_for_deployment", Mock(side_effect=RuntimeError))

    with pytest.raises(RuntimeError):
        ingress.serve_http(MagicMock(), 0, heartbeat.beat)

    assert seen == [False]
    assert heartbeat.has_served


@pytest.mark.parametrize("has_served", [True, False])
def test_a_service_without_restarts_does_not_replace_its_ingress(has_served: bool) -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(0), 60.0, 60.0)
    if has_served:
        supervisor._ingresses[0].heartbeat.beat()

    assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) == 1
