"""Some fork servers of a service die, and some processes that wait for a fork die. All of them are
replaced.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_deaths import LONG, RAYLET, fork_servers, kill
from tests.cli.test_recovery import Service, serving

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def servers_of_all(service: Service) -> set[int]:
    """Return the process ids of all fork servers of the service."""
    return {pid for pid in service.all() if b"forks.fork_server" in _command_line(pid)}


def test_a_fork_server_that_dies_is_replaced_before_it_is_needed(npu: object) -> None:
    with serving() as service:
        if not (before := servers_of_all(service)):
            pytest.skip("there is a core for each process, so nothing is forked")

        for pid in before:
            os.kill(pid, signal.SIGKILL)

        wait_until(lambda: bool(servers_of_all(service) - before), "no other one starts", WAIT_S)


def clients_of_fork_servers(service: Service) -> list[int]:
    """Return the processes that Ray has started and that still wait for their fork server."""
    return [
        pid
        for raylet in service.pids(RAYLET)
        for pid in processes.children(raylet)
        if b"fork_client" in _command_line(pid)
    ]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has just ended
        return b""


def test_a_replacement_that_dies_before_ray_knows_it_is_started_again(npu: object) -> None:
    """Without our restart, Ray would wait five minutes for the replacement. The requests of this
    test do not wait that long.
    """
    with serving("recovery.wait_s=200") as service:
        if not fork_servers(service):
            pytest.skip("there is a core for each process, so nothing is forked")

        def strike() -> None:
            kill(service, "ray::Engine")
            # Search without pauses, because a client of a fork server exists only for a moment.
            deadline_s = time.monotonic() + WAIT_S
            while not (found := clients_of_fork_servers(service)):
                assert time.monotonic() < deadline_s, "nothing is started"
            for pid in found:
                os.kill(pid, signal.SIGKILL)

        streams = service.ask_all(LONG, strike)

        assert [stream.error for stream in streams if stream.error] == []
