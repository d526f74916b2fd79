"""Ray on several hosts. Each host is a set of Linux namespaces on this machine. Only root can
create namespaces.

The head has no NPUs. On each host, a shell starts Ray again whenever Ray has ended, as systemd does
with the units in cluster/systemd.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.host import processes
from dist_aclgraph.environment import environment_with
from dist_aclgraph.errors import DistAclGraphError
from tools.namespaces import Node, nodes

ROOT = Path(__file__).parents[2]
PRIVATE = "/mnt"  # Ray uses the same file names on all hosts as on the head
SHARED_MEMORY = "/dev/shm"
START_S, ASK_S, PAUSE_S = 400.0, 60.0, 0.5
KEEP_UP = 'while true; do "$@"; sleep 2; done'
RAY_PORT = 6379  # Ray's default
# This program asks only Ray's control store, because the node manager of the head may be dead.
COUNT = """
import sys
from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo

found = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=30).values()
print("up", sum(node.state == GcsNodeInfo.GcsNodeState.ALIVE for node in found))
"""
DAEMONS = ("raylet", "gcs_server")
WORKER, ENGINE, CONTROLLER = "ray::Worker", "ray::Engine", "ray::Controller"


class HostsError(DistAclGraphError):
    """A host did not start, or does not run an expected process."""


class Hosts:
    """A head, and other hosts with emulated NPUs.

    Args:
        made: the nodes on which Ray is started. The first node is the head.
        logs: folder for the output of Ray.
        npus: number of NPUs of each host, except the head.
    """

    def __init__(self, made: list[Node], logs: Path, npus: int) -> None:
        self.head, *self.others = made
        self._logs = logs
        self._npus = npus
        self.environment = environment_with(
            {
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path())),
                "PYTHONPATH": str(ROOT),
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_AUTH_MODE": "token",
                "RAY_TMPDIR": PRIVATE,
                # The same storage as in ray-head.service.
                "RAY_gcs_storage": "rocksdb",
                "RAY_gcs_storage_path": f"{PRIVATE}/gcs",
            }
        )

    @property
    def all(self) -> list[Node]:
        return [self.head, *self.others]

    def start(self) -> None:
        """Start Ray on all hosts.

        Raises:
            HostsError: a host did not start in time.
        """
        self._keep_up(self.head, "start-head.sh", "--include-dashboard=false")
        self._wait_for(1)
        for node in self.others:
            self.come_back(node)
        self._wait_for(len(self.all))

    def _wait_for(self, count: int) -> None:
        until_s = time.monotonic() + START_S
        while (found := self.num_alive()) < count:
            if time.monotonic() > until_s:
                said = "\n".join(log.read_text() for log in sorted(self._logs.glob("*.log")))
                raise HostsError(f"{found} of {count} hosts are up after {START_S:g} s: {said}")
            time.sleep(PAUSE_S)

    def _keep_up(self, node: Node, script: str, *arguments: str, **variables: str) -> None:
        command = [str(ROOT / "cluster" / script), *arguments, "--block", "--num-cpus=4",
                   f"--node-ip-address={node.address}"]  # fmt: skip
        with (self._logs / f"{node.address}.log").open("a") as log:
            node.start(
                ["bash", "-c", KEEP_UP, "keep-up", *command],
                env={**self.environment, **variables}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def popen(
        self, command: list[str], node: Node | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a program on a host (by default on the head). The program is a client of Ray."""
        env = {**self.environment, **options.pop("env", {}), "RAY_ADDRESS": "auto"}
        return (node or self.head).start(command, env=env, **{"text": True, **options})

    def num_alive(self) -> int:
        """Return the number of hosts that Ray considers alive; 0 if Ray does not answer."""
        asked = self.popen(
            [sys.executable, "-c", COUNT, f"{self.head.address}:{RAY_PORT}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            said, _ = asked.communicate(timeout=ASK_S)
        except subprocess.TimeoutExpired:
            os.killpg(asked.pid, signal.SIGKILL)
            said, _ = asked.communicate()
        return next((int(x.split()[1]) for x in said.splitlines() if x.startswith("up ")), 0)

    # ---- faults

    def fail(self, node: Node) -> None:
        """End all processes of a host at once, like a power failure. Other hosts get no message
        about the failure.
        """
        node.set_link(False)
        folders = f"{SHARED_MEMORY} {PRIVATE} {node.temporary}"
        node.run(["bash", "-c", f"kill -KILL -1; find {folders} -mindepth 1 -delete"], 30)

    def come_back(self, node: Node) -> None:
        """Start Ray on a failed host again, as systemd does when a machine boots."""
        node.set_link(True)
        self._keep_up(
            node, "start-worker.sh", self.head.address, EMULATED_NPUS=str(self._npus)
        )  # fmt: skip

    def kill(self, node: Node, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a host whose command line contains ``name``.

        Raises:
            HostsError: there is no such process.
        """
        if node.run(["pkill", f"-{int(number)}", "-f", name], 30).returncode:
            raise HostsError(f"no process of {node.address} is named {name}")

    def with_groups(self) -> list[Node]:
        """Return the hosts on which ranks run."""
        return [node for node in self.others if _has(node, WORKER)]

    # ---- a service on these hosts; see ``Place``

    def start_service(self, command: list[str], folder: Path, log: Any) -> subprocess.Popen[Any]:
        return self.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop_service(self, process: subprocess.Popen[Any]) -> None:
        for pid in processes.children(process.pid):  # the process itself only waits for its child
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def pids_of_service(self, leader: int, folder: Path) -> set[int]:
        return session(leader) | self._with_names((WORKER, ENGINE, CONTROLLER))

    def daemons(self) -> set[int]:
        return self._with_names(DAEMONS)

    def memories(self) -> Iterator[tuple[Path, Callable[[], set[int]]]]:
        for node in self.all:
            yield node.files / SHARED_MEMORY[1:], partial(_ids, node)

    def temporary(self, folder: Path) -> list[Path]:
        # When an engine starts on a host, the directories of killed engines on this host are
        # removed. So hosts without an engine are left out.
        with_engines = [node for node in self.others if _has(node, ENGINE)]
        return [node.temporary for node in (self.head, *with_engines)]

    def _with_names(self, names: tuple[str, ...]) -> set[int]:
        pids = [pid for node in self.all for pid in node.pids()]
        return {pid for pid in pids if processes.name_of(pid).startswith(names)}


def session(leader: int) -> set[int]:
    """Return the living processes of a process session."""
    found = set()
    for pid in processes.living():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                found.add(pid)
    return found


def _ids(node: Node) -> set[int]:
    return set(node.pids().values())


def _has(node: Node, name: str) -> bool:
    return any(processes.name_of(pid).startswith(name) for pid in node.pids())


@contextmanager
def hosts(count: int, npus: int) -> Iterator[Hosts]:
    """Create a head, and ``count`` other hosts with ``npus`` NPUs each. End all hosts when the
    context ends.

    Raises:
        NoNamespaces: this machine does not permit namespaces.
        HostsError: Ray does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as logs,
        nodes(count + 1, private=(SHARED_MEMORY, PRIVATE)) as made,
    ):
        found = Hosts(made, Path(logs), npus)
        found.start()
        yield found
