"""A service ends cleanly if its terminal is closed, or if a signal arrives during a recovery."""

from __future__ import annotations

import os
import shlex
import signal

import pytest

from tests.actors.leftovers import assert_processes_are_gone, wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_deaths import OWNER, RAYLET, end, kill
from tests.cli.test_recovery import serving

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def in_a_terminal(command: list[str]) -> list[str]:
    return ["script", "--quiet", "--command", shlex.join(command), os.devnull]


def test_a_terminal_that_is_closed_stops_a_service_in_order(npu: object) -> None:
    """When a terminal's window is closed or its ssh connection is lost, the service can write no
    output.

    The streams take longer than ``FAILED_S``, the time after a failure for which the owner lets
    requests continue.
    """
    with serving("serve.drain_s=300", terminal=in_a_terminal) as service:
        wanted = [stream.text for stream in service.ask_all(400)]

        streams = service.ask_all(400, service.process.kill)

        assert [stream.error for stream in streams if stream.error] == []
        assert [stream.text for stream in streams] == wanted
        wait_until(lambda: not service.all(), "a process is left", WAIT_S)


def test_a_signal_while_the_deployment_comes_back_ends_everything(npu: object) -> None:
    with serving("serve.drain_s=1") as service:
        struck = service.pids(OWNER) + service.pids("ray::")
        kill(service, RAYLET)
        # Wait until another owner starts.
        wait_until(lambda: "again" in "".join(service.said), "it does not come back", WAIT_S)
        wait_until(lambda: bool(service.pids(RAYLET)), "no Ray is started", WAIT_S)

        service.process.send_signal(signal.SIGTERM)

        # An owner that takes too long to end is killed. The exit code is then 128 + SIGKILL.
        assert end(service) in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert_processes_are_gone(struck)
