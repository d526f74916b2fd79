"""If processes of a service with one group are killed, the service pauses, but loses no request."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import wait_until
from tests.cli.test_changing_groups import COMMAND, OVERRIDES, ROOT, WAIT_S
from tests.ports import free_port
from tests.serve.conftest import CONFIG

STREAMS = 16
MARK = "TEST_OF_RECOVERY"  # environment variable that marks all processes of a service
LIMITS = httpx.Limits(max_connections=4 * STREAMS)


@dataclass
class Stream:
    """The streamed answer to one request."""

    text: str = ""
    error: str = ""
    began: threading.Event = field(default_factory=threading.Event)

    def take(self, lines: Iterator[str]) -> None:
        for line in lines:
            if not line.startswith("data: {"):
                continue
            body = json.loads(line.removeprefix("data: "))
            if "error" in body:
                self.error = body["error"]["message"]
                return
            self.text += body["choices"][0]["text"]
            self.began.set()


class Service:
    """A service of one group. It runs in another process, with additional environment variables.

    Args:
        terminal: function that changes the service's command, so that the service runs in a
            separate terminal.
    """

    def __init__(
        self,
        *overrides: str,
        terminal: Callable[[list[str]], list[str]] | None = None,
        **variables: str,
    ) -> None:
        port = free_port()
        self._mark = secrets.token_hex(8)
        command = [*COMMAND, "serve", str(CONFIG), *OVERRIDES, *overrides, f"--port={port}"]
        self.process = subprocess.Popen(
            command if terminal is None else terminal(command),
            cwd=ROOT, env={**os.environ, **variables, MARK: self._mark}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.said: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, limits=LIMITS)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def status(self, path: str) -> int:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, "".join(self.said)
            return self.status("/ready") == 200

        wait_until(is_ready, "it is not ready", WAIT_S)

    def all(self) -> set[int]:
        """Return the process ids of all living processes of the service."""
        # Forked processes have other parents than Ray's processes, but inherit the environment
        # variable.
        return processes.with_variable(MARK, self._mark) & processes.living()

    def pids(self, name: str) -> list[int]:
        """Return the service's processes whose names begin with ``name``."""
        return sorted(pid for pid in self.all() if processes.name_of(pid).startswith(name))

    def strike(self, kind: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send signal ``number`` to the newest process of the actor class ``kind``; return its
        process id.
        """
        [*_, pid] = self.pids(f"ray::{kind}")
        os.kill(pid, number)
        return pid

    def kill_a_worker(self) -> None:
        self.strike("Worker")

    def ask(self, which: int, stream: Stream, count: int) -> None:
        body = {
            "model": "tiny-qwen3", "prompt": [70 + which, 71, 72], "max_tokens": count,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        try:
            with self.http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    stream.error = reply.read().decode()
                else:
                    stream.take(reply.iter_lines())
        except httpx.TransportError as e:
            stream.error = repr(e)

    def ask_all(self, count: int, meanwhile: Callable[[], None] = lambda: None) -> list[Stream]:
        """Run ``count`` streams at once; call ``meanwhile`` when all of them have begun."""
        streams = [Stream() for _ in range(STREAMS)]
        threads = [
            threading.Thread(target=self.ask, args=[i, stream, count], daemon=True)
            for i, stream in enumerate(streams)
        ]
        for thread in threads:
            thread.start()
        assert all(stream.began.wait(WAIT_S) for stream in streams)
        meanwhile()
        for thread in threads:
            thread.join(WAIT_S)
        return streams

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()


@contextmanager
def serving(*overrides: str, **more: Any) -> Iterator[Service]:
    service = Service("scheduler.max_num_seqs=16", *overrides, **more)
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.close()


@pytest.fixture
def service() -> Iterator[Service]:
    with serving("recovery.restarts_per_hour=1") as service:
        yield service


@pytest.mark.slow
@pytest.mark.cluster
def test_the_death_of_the_only_group_costs_time_and_no_request_until_no_restart_is_left(
    service: Service, npu: object
) -> None:
    wanted = [stream.text for stream in service.ask_all(600)]
    late = Stream()
    seen: dict[str, httpx.Response] = {}

    def kill() -> None:
        service.kill_a_worker()
        wait_until(lambda: service.status("/ready") == 503, "it is ready without a group", 60)
        seen["ready"] = service.http.get("/ready")
        seen["health"] = service.http.get("/health")
        service.ask(0, late, 600)
        service.wait_until_ready()

    streams = service.ask_all(600, kill)

    assert [stream.error for stream in streams if stream.error] == []
    assert [stream.text for stream in streams] == wanted
    assert (late.error, late.text) == ("", wanted[0])
    assert seen["ready"].status_code == 503
    assert "no group takes requests" in seen["ready"].text and "recovering" in seen["ready"].text
    assert (seen["health"].status_code, seen["health"].json()["status"]) == (200, "recovering")
    metrics = service.http.get("/metrics").text.splitlines()
    [outage] = [line for line in metrics if line.startswith("dist_aclgraph_outage_seconds_total{")]
    assert float(outage.rpartition(" ")[2]) > 0

    streams = service.ask_all(1500, service.kill_a_worker)

    assert all("recovery.restarts_per_hour allows 1" in stream.error for stream in streams)
    assert service.process.wait(WAIT_S) == 1
    service._reading.join(WAIT_S)
    assert any("recovery.restarts_per_hour allows 1" in line for line in service.said), service.said


@pytest.mark.slow
@pytest.mark.cluster
def test_a_controller_that_dies_or_hangs_takes_its_groups_along_and_no_request(npu: object) -> None:
    with serving("recovery.restarts_per_hour=2", "timeouts.link_s=5") as service:
        wanted = [stream.text for stream in service.ask_all(600)]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            struck = 0

            def strike(number: signal.Signals = number) -> None:
                nonlocal struck
                struck = service.strike("Controller", number)
                wait_until(lambda: service.status("/ready") == 503, "it is ready", WAIT_S)
                service.wait_until_ready()

            streams = service.ask_all(600, strike)

            assert [stream.error for stream in streams if stream.error] == []
            assert [stream.text for stream in streams] == wanted
            assert not processes.name_of(struck), "it is still there"

        metrics = service.http.get("/metrics").text
        assert 'engine="2000"' in metrics  # the name of the third controller's first group
        service.strike("Controller")
        assert service.process.wait(WAIT_S) == 1
        service._reading.join(WAIT_S)
        assert any("recovery.restarts_per_hour allows 2" in line for line in service.said)
