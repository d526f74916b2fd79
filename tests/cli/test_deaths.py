"""If processes of a service are killed, the service recovers, and streams continue."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import assert_processes_are_gone, wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_recovery import Service, Stream, serving
from tests.slow import rare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

OWNER, INGRESS, RAYLET, GCS = "serve:owner", "serve:ingress", "raylet", "gcs_server"
LONG = 200  # tokens of an answer that still runs when a process is killed
BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")


def kill(service: Service, name: str) -> int:
    [pid] = service.pids(name)
    os.kill(pid, signal.SIGKILL)
    return pid


def is_busy(service: Service) -> bool:
    lines = service.http.get("/metrics").text.splitlines()
    return any(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(tuple(f"dist_aclgraph_{name}{{" for name in BUSY))
    )


def fork_servers(service: Service) -> set[int]:
    """Return ids of the service's fork servers; there are none if each process has a core."""
    return {
        pid
        for pid in processes.children(service.process.pid)
        if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def end(service: Service) -> int:
    """Wait for the end of a service and all its processes; return the exit code."""
    code = service.process.wait(WAIT_S)
    wait_until(lambda: not service.all(), "a process is left", WAIT_S)
    service._reading.join(WAIT_S)
    return code


@pytest.mark.slow
def test_the_streams_of_an_ingress_that_is_killed_go_on_with_another(npu: object) -> None:
    with serving() as service:
        wanted = [stream.text for stream in service.ask_all(LONG)]
        others = {name: service.pids(name) for name in (OWNER, RAYLET, "ray::Engine")}
        meanwhile: list[int] = []

        def strike() -> None:
            kill(service, INGRESS)
            # A client that connects during the outage waits, and is not refused.
            meanwhile.append(service.http.get("/health").status_code)

        streams = service.ask_all(LONG, strike)

        assert meanwhile and meanwhile[0] in (200, 503)
        assert [stream.error for stream in streams] == [""] * len(streams)
        assert [stream.text for stream in streams] == wanted
        service.wait_until_ready()
        assert {name: service.pids(name) for name in others} == others
        wait_until(lambda: not is_busy(service), "the engine keeps what nobody waits for", 60)
        again = service.ask_all(60)
        for stream, text in zip(again, wanted, strict=True):
            assert stream.text and text.startswith(stream.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", [OWNER, rare(RAYLET), GCS])
def test_a_deployment_that_is_lost_as_a_whole_costs_time_and_no_request(
    name: str, npu: object
) -> None:
    with serving("recovery.restarts_per_hour=1") as service:
        wanted = [stream.text for stream in service.ask_all(LONG)]
        ingress, forking = service.pids(INGRESS), fork_servers(service)
        late = Stream()

        def strike() -> None:
            kill(service, name)
            wait_until(lambda: service.status("/ready") == 503, "it is ready without Ray", WAIT_S)
            assert service.http.get("/health").json()["status"] == "recovering"
            service.ask(0, late, LONG)

        streams = service.ask_all(LONG, strike)

        assert [stream.error for stream in streams if stream.error] == []
        assert [stream.text for stream in streams] == wanted
        assert (late.error, late.text) == ("", wanted[0])
        assert service.pids(INGRESS) == ingress
        assert fork_servers(service) == forking

        kill(service, name)

        assert end(service) == (128 + signal.SIGKILL if name == OWNER else 1)
        assert "recovery.restarts_per_hour allows 1" in "".join(service.said)


def in_a_terminal(command: list[str]) -> list[str]:
    return ["script", "--quiet", "--command", shlex.join(command), os.devnull]


@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_a_service_in_order(npu: object) -> None:
    """After a window is closed or an ssh connection is lost, the service can write no output."""
    with serving("serve.drain_s=300", terminal=in_a_terminal) as service:
        wanted = [stream.text for stream in service.ask_all(60)]

        streams = service.ask_all(60, service.process.kill)

        assert [stream.error for stream in streams if stream.error] == []
        assert [stream.text for stream in streams] == wanted
        wait_until(lambda: not service.all(), "a process is left", WAIT_S)


def servers_of_all(service: Service) -> set[int]:
    """Return the fork servers of all processes of the service."""
    return {pid for pid in service.all() if b"forks.fork_server" in _command_line(pid)}


@pytest.mark.slow
def test_a_fork_server_that_dies_is_replaced_before_it_is_needed(npu: object) -> None:
    with serving() as service:
        if not (before := servers_of_all(service)):
            pytest.skip("there is a core for each process, so nothing is forked")

        for pid in before:
            os.kill(pid, signal.SIGKILL)

        wait_until(lambda: bool(servers_of_all(service) - before), "no other one starts", WAIT_S)


def clients_of_fork_servers(service: Service) -> list[int]:
    """Return the processes that Ray has started, and that still wait to be forked."""
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


@pytest.mark.slow
def test_a_replacement_that_dies_before_ray_knows_it_is_started_again(npu: object) -> None:
    """Ray alone would wait five minutes for the replacement, longer than requests wait here."""
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


@pytest.mark.slow
def test_a_signal_while_the_deployment_comes_back_ends_everything(npu: object) -> None:
    with serving("serve.drain_s=1") as service:
        struck = service.pids(OWNER) + service.pids("ray::")
        kill(service, RAYLET)
        # Wait until another owner starts.
        wait_until(lambda: "again" in "".join(service.said), "it does not come back", WAIT_S)
        wait_until(lambda: bool(service.pids(RAYLET)), "no Ray is started", WAIT_S)

        service.process.send_signal(signal.SIGTERM)

        assert end(service) == 128 + signal.SIGTERM
        assert_processes_are_gone(struck)
