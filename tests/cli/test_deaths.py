"""If processes of a service are killed, the service recovers, and streams continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_recovery import Service, Stream, serving
from tests.slow import rare

pytestmark = [pytest.mark.cluster]

OWNER, INGRESS, RAYLET, GCS = "serve:owner", "serve:ingress", "raylet", "gcs_server"
LONG = 200  # number of tokens of an answer that must still run when a process is killed
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
    """Return the process ids of the service's fork servers. There is no fork server if there are
    enough cores for all processes.
    """
    return {
        pid
        for pid in processes.children(service.process.pid)
        if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def end(service: Service) -> int:
    """Wait until the service and all its processes have ended; return the exit code."""
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
            # A client that connects while no ingress runs must wait, but is not refused.
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
@pytest.mark.parametrize("name", [OWNER, rare(RAYLET), rare(GCS)])
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
