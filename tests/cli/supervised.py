"""A supervised service with a fake owner and a fake ingress: processes that only wait."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import assert_processes_are_gone, wait_until

MARK = "TEST_OF_SUPERVISION"  # environment variable that marks all processes of a service
OWNER, INGRESS = "serve:owner", "serve:ingress"
WAIT_S = 180.0

PARTS = r"""
SILENT_S = END_S = 60.0
NUM_INGRESSES = 1
END_STARTED = lambda: None
import logging, os, select, signal, subprocess, sys, time
from dist_aclgraph.cli.supervise import Supervisor
from dist_aclgraph.errors import ConfigError, EngineDeadError, PlacementError, RayDiedError
from dist_aclgraph.planning.restarts import RestartBudget

logging.getLogger("dist_aclgraph").addHandler(logging.NullHandler())  # stderr has only sentences

def say(text):  # in one piece, as several processes speak
    os.write(1, f"{text}\n".encode())

def own(signals, heartbeat):
    heartbeat.beat()
    say("owns")
    while not signals.wait(0.1):
        heartbeat.beat()
    say("stopped in order")
    sys.exit(7)

def serve_http(life, beat, keeper):
    beat()
    say("listens")
    while not select.select([life], [], [], 0.1)[0]:
        beat()
"""
RUN = """
INGRESSES = [serve_http] * NUM_INGRESSES
sys.exit(Supervisor(own, INGRESSES, RestartBudget(2), SILENT_S, END_S, END_STARTED).run())
"""


class Service:
    """A service that is the leader of its own process group, like a program that a shell or a
    container starts.
    """

    def __init__(self, parts: str = "") -> None:
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PARTS + parts + RUN],
            # A thread of OpenBLAS could get a signal that the main thread should get. A forked
            # process has no such threads, but some of these tests do not fork.
            env={**os.environ, MARK: self._mark, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def all(self) -> set[int]:
        return processes.with_variable(MARK, self._mark) & processes.living()

    def pid(self, name: str) -> int:
        [found] = self.pids(name, 1)
        return found

    def pids(self, name: str, count: int) -> set[int]:
        found: set[int] = set()

        def are_there() -> bool:
            found.clear()
            found.update(pid for pid in self.all() if processes.name_of(pid) == name)
            return len(found) == count

        wait_until(are_there, f"there is no {name}", WAIT_S)
        return found

    def kill(self, name: str) -> int:
        """Wait until the process ``name`` runs, kill it, and wait for its end; return its process
        id.
        """
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        assert_processes_are_gone([pid])
        return pid

    def lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return sorted(self.process.stdout.readline().strip() for _ in range(count))

    def end(self) -> tuple[int, str, str]:
        """Wait until the service and all its processes have ended; return the exit code and the
        output.
        """
        said, wrong = self.process.communicate(timeout=WAIT_S)
        wait_until(lambda: not self.all(), "a process is left", WAIT_S)
        return self.process.returncode, said, wrong


Start = Callable[..., Service]
