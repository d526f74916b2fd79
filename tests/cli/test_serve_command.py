"""``dist-aclgraph serve`` starts, serves and stops a fake deployment that the tests control."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial

import httpx
import pytest

from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.host import processes
from dist_aclgraph.cli import owner
from dist_aclgraph.cli import serve as serve_module
from dist_aclgraph.cli.serve import serve, serve_until_signal
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import ConfigError, EngineDeadError, WorkerLostError
from dist_aclgraph.planning.restarts import RestartBudget
from tests.ports import free_port
from tests.serve.conftest import CONFIG, until
from tests.serve.service.test_llm import FakeDeployment

MODEL = "tiny-qwen3"
WAIT_S = 180.0


class Obedient(FakeDeployment):
    """A fake deployment. The test decides when it starts, fails and stops."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start, self.may_stop = threading.Event(), threading.Event()
        self.failure = ""
        self.is_stopping = False
        self.may_start.set()
        self.may_stop.set()

    def start(self, config, on_progress, **options):
        while not self.may_start.wait(0.01):
            on_progress(Progress("LOADING", 0, 0, ""))
        return self

    def raise_if_dead(self) -> None:
        if self.failure:
            raise EngineDeadError(self.failure)

    def shut_down(self) -> None:
        self.is_stopping = True
        assert self.may_stop.wait(WAIT_S)
        super().shut_down()


class Command:
    """Runs ``dist-aclgraph serve`` in the main thread, and the actions of its clients in another
    thread.
    """

    def __init__(self, **overrides: object) -> None:
        self.port = free_port()
        self.config = load_config(CONFIG, {"serve.port": self.port, **overrides})
        self.deployment = Obedient()
        self.seen: dict[str, httpx.Response] = {}
        self._wrong: list[BaseException] = []

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT_S)

    def post(self) -> httpx.Response:
        body = {"model": MODEL, "prompt": [70], "max_tokens": 1}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=WAIT_S)

    def wait_for(self, status: int) -> None:
        def is_there() -> bool:
            try:
                return self.get("/ready").status_code == status
            except httpx.ConnectError:
                return False

        until(is_there, WAIT_S)

    def run(self, meanwhile, serve_config=serve_until_signal) -> None:
        def act() -> None:
            try:
                meanwhile()
            except BaseException as e:
                self._wrong.append(e)
            finally:
                self.deployment.may_start.set()
                self.deployment.may_stop.set()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

        thread = threading.Thread(target=act)
        thread.start()
        try:
            serve_config(self.config, self.deployment.start)
        finally:
            thread.join(WAIT_S)
            assert not self._wrong, self._wrong
            assert not self.deployment.is_running


@pytest.fixture(autouse=True)
def signals_of_the_test():
    """Ignore SIGTERM outside the command, because a test's last signal can arrive after the
    command's end.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    time.sleep(0)
    signal.signal(signal.SIGTERM, before)


def test_without_keeping_answers_it_serves_from_one_process():
    command = Command(**{"recovery.keep_answers": False})
    before = processes.children(os.getpid())

    def meanwhile() -> None:
        command.wait_for(200)
        command.seen["serving"] = command.post()
        # The comparison is not ==, because processes of other tests can end meanwhile.
        assert processes.children(os.getpid()) <= before

    command.run(meanwhile, serve)

    assert command.seen["serving"].status_code == 200


def test_serve_answers_503_until_it_serves_and_while_it_stops(capsys):
    command = Command()
    deployment = command.deployment
    deployment.may_start.clear()

    def meanwhile() -> None:
        command.wait_for(503)
        command.seen["starting"] = command.post()
        deployment.may_start.set()
        command.wait_for(200)
        command.seen["serving"] = command.post()
        deployment.may_stop.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        until(lambda: deployment.is_stopping, WAIT_S)
        for path in ("/ready", "/health"):
            command.seen[path] = command.get(path)
        command.seen["stopping"] = command.post()

    command.run(meanwhile)

    statuses = {name: reply.status_code for name, reply in command.seen.items()}
    assert statuses == {
        "starting": 503, "serving": 200, "/ready": 503, "/health": 503, "stopping": 503,
    }  # fmt: skip
    for name in ("starting", "stopping"):
        assert command.seen[name].headers["retry-after"] == "1"
        assert command.seen[name].json()["error"]["type"] == "service_unavailable"
    assert "Ready at" in capsys.readouterr().out
    with pytest.raises(httpx.ConnectError):
        command.get("/ready")


def test_metrics_tell_how_many_controllers_and_owners_may_be_replaced(monkeypatch):
    own = partial(owner.own_deployment, restarts=RestartBudget(6))
    monkeypatch.setattr(serve_module, "own_deployment", own)
    command = Command()
    left: dict[str, str] = {}

    def meanwhile() -> None:
        def is_told() -> bool:
            text = command.get("/metrics").text
            found = re.findall(r'service_restarts_left\{.*of="(\w+)".*\} (\S+)', text)
            left.update(found)
            return bool(left)

        command.wait_for(200)
        until(is_told, WAIT_S)

    command.run(meanwhile)

    assert left == {"controller": "4.0", "owner": "6.0"}


def test_a_deployment_that_dies_ends_it_with_the_reason():
    command = Command()
    deployment = command.deployment

    def meanwhile() -> None:
        command.wait_for(200)
        deployment.may_stop.clear()
        deployment.failure = "rank 1 in SERVING: the process died"
        until(lambda: deployment.is_stopping, WAIT_S)
        command.seen["after"] = command.post()

    with pytest.raises(EngineDeadError.__mro__[1], match="has ended: rank 1 in SERVING"):
        command.run(meanwhile)

    assert command.seen["after"].status_code == 503
    assert "the process died" in command.seen["after"].json()["error"]["message"]


def test_a_signal_before_anything_is_served_is_told_by_the_exit_code():
    command = Command()
    command.deployment.may_start.clear()

    def meanwhile() -> None:
        command.wait_for(503)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)

    command.deployment.shut_down()  # the command does not stop a deployment that never started
    with pytest.raises(SystemExit) as e:
        command.run(meanwhile)

    assert e.value.code == 128 + signal.SIGINT


def interrupted_start(capsys) -> tuple[int, str]:
    """Send a signal during a start that reports no progress; return the exit code and stderr."""
    command = Command()
    command.deployment.shut_down()

    def start(config, on_progress, **options):
        assert not threading.Event().wait(WAIT_S)

    def meanwhile() -> None:
        command.wait_for(503)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    command.deployment.start = start
    with pytest.raises(SystemExit) as e:
        command.run(meanwhile)
    return e.value.code, capsys.readouterr().err


def test_a_start_that_reports_nothing_hears_a_signal_at_once(capsys):
    began_s = time.monotonic()

    code, said = interrupted_start(capsys)

    assert code == 128 + signal.SIGINT
    assert said.splitlines()[-2:] == ["Stopping ...", "Stopped."]
    assert time.monotonic() - began_s < WAIT_S / 2


def test_an_owner_with_a_supervisor_leaves_its_start_to_it(capsys, monkeypatch):
    left = []

    def leave(code: int) -> None:
        left.append(code)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner.os, "_exit", leave)
    monkeypatch.setattr(
        serve_module, "own_deployment", partial(owner.own_deployment, restarts=RestartBudget(6))
    )

    interrupted_start(capsys)

    assert left == [128 + signal.SIGINT]


def test_a_start_that_fails_leaves_no_port_open():
    command = Command()
    command.deployment.shut_down()

    def start(config, on_progress, **options):
        raise WorkerLostError("the process died", 1, "LOADING")

    with pytest.raises(WorkerLostError):
        serve_until_signal(command.config, start)

    with pytest.raises(httpx.ConnectError):
        command.get("/ready")


def test_beyond_loopback_it_asks_for_a_key_before_anything_starts():
    command = Command(**{"serve.host": "0.0.0.0"})
    command.deployment.shut_down()

    with pytest.raises(ConfigError, match="there is no API key"):
        serve_until_signal(command.config, command.deployment.start)
