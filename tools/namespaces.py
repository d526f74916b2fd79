"""Creates several nodes on one machine. Each node has its own Linux namespaces for network, shared
memory and process ids. A bridge connects the networks of the nodes.

A node does not see the network, the /dev/shm and the process ids of other nodes. When a node ends,
all its processes end. All nodes end when this process ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.host import processes
from dist_aclgraph.environment import environment_with

NETWORK = "10.231.7"  # exists only inside the namespaces
_START_S = 20
_CLONE_NEWNET = 0x40000000  # of linux/sched.h


class NoNamespaces(Exception):
    """This machine does not permit namespaces. The message says which operation failed."""


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S)
    if done.returncode:
        raise NoNamespaces(f"{shlex.join(command)}: {done.stderr.strip()}")


class _Holder:
    """An idle process that keeps the namespaces of a node alive. If it ends, all processes of the
    node end.
    """

    def __init__(self, setup: Sequence[str] = ()) -> None:
        script = " && ".join(["ip link set lo up", *setup, "echo ready", "exec cat"])
        self._unshare = subprocess.Popen(
            [
                *("unshare", "--net", "--uts", "--mount", "--propagation", "private"),
                *("--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script),
            ],
            stdin=subprocess.PIPE,  # `cat` ends when this process closes the pipe or ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout and self._unshare.stderr
        if self._unshare.stdout.readline() != "ready\n":
            problem = self._unshare.stderr.read().strip()
            self.close()
            raise NoNamespaces(problem or "unshare failed")
        parent = self._unshare.pid
        self.pid = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())

    def enter(self, command: Sequence[str], folder: str = "/") -> list[str]:
        """Return the command line with which ``command`` runs inside the node's namespaces."""
        target = ("--target", str(self.pid), "--net", "--uts", "--mount", "--pid")
        return ["nsenter", *target, f"--wd={folder}", "--", *command]

    def do(self, line: str) -> None:
        """Run a short command inside the namespaces.

        Raises:
            NoNamespaces: the command failed.
        """
        _call(self.enter(line.split()))

    def close(self) -> None:
        assert self._unshare.stdin and self._unshare.stdout and self._unshare.stderr
        self._unshare.stdin.close()
        try:
            self._unshare.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._unshare.kill()
            self._unshare.wait()
        self._unshare.stdout.close()
        self._unshare.stderr.close()


class Node:
    """One node, with its own network, /dev/shm and process ids.

    Attributes:
        address: IPv4 address to which other nodes can connect.
        temporary: folder for the node's temporary files, which is the TMPDIR of its processes.
    """

    def __init__(self, index: int, holder: _Holder, switch: _Holder, temporary: Path) -> None:
        self.address = f"{NETWORK}.{index + 1}"
        self.temporary = temporary
        self._holder, self._switch, self._port = holder, switch, f"port{index}"

    def connect(self) -> None:
        """Connect the node's network to the bridge."""
        # The command runs outside of the node. Outside, each ``pid`` is the id of a process that
        # keeps namespaces.
        ends = f"{self._port} netns {self._switch.pid} type veth"
        peer = f"peer name eth0 netns {self._holder.pid}"
        _call(f"ip link add {ends} {peer}".split())
        self._switch.do(f"ip link set {self._port} master bridge up")
        self._holder.do(f"ip address add {self.address}/24 dev eth0")
        self._holder.do("ip link set eth0 up")

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program in this node, in the caller's working directory and in a new process
        group.

        The returned process only waits for the program. A signal to the new process group
        (``os.killpg``) can end the program without ending the node.
        """
        return subprocess.Popen(
            self._holder.enter(command, os.getcwd()),
            env={**(environment_with({}) if env is None else env), "TMPDIR": str(self.temporary)},
            start_new_session=True,
            **options,
        )

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a program in this node. Return its output and its exit status."""
        return subprocess.run(
            self._holder.enter(command, os.getcwd()),
            env=environment_with({"TMPDIR": str(self.temporary)}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def set_link(self, is_up: bool) -> None:
        """Connect the node to the network, or disconnect it. While it is disconnected, packets are
        lost without an error.
        """
        self._switch.do(f"ip link set {self._port} {'up' if is_up else 'down'}")

    @property
    def files(self) -> Path:
        """The root folder of the node, as processes of this machine see it."""
        return Path(f"/proc/{self._holder.pid}/root")

    def pids(self) -> dict[int, int]:
        """Return the living processes of the node, except the process that keeps its namespaces.

        The keys are the process ids as this machine sees them, and the values are the ids as the
        node sees them.
        """
        found = {}
        own = os.readlink(f"/proc/{self._holder.pid}/ns/pid")
        for pid in processes.living() - {self._holder.pid}:
            with suppress(OSError):  # the process has just ended
                if os.readlink(f"/proc/{pid}/ns/pid") == own:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    ids = next(line for line in lines if line.startswith("NSpid:"))
                    found[pid] = int(ids.split()[-1])
        return found

    @contextmanager
    def network(self) -> Iterator[None]:
        """Within this context, this thread uses the node's network. The threads and processes that
        this thread starts use the same network.
        """
        with open("/proc/thread-self/ns/net") as before:
            _enter_network(f"/proc/{self._holder.pid}/ns/net")
            try:
                yield
            finally:
                _enter_network(f"/proc/self/fd/{before.fileno()}")

    def kill(self) -> None:
        """End the node and all its processes at once, as a power failure would."""
        self._holder.close()


def _enter_network(path: str) -> None:
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "this thread cannot enter a network", path)


@contextmanager
def nodes(count: int, *, private: Sequence[str] = ("/dev/shm",)) -> Iterator[list[Node]]:
    """Create nodes on one network. When the context ends, end the nodes and all their processes.

    Args:
        private: folders that each node has separately. They are empty at first.

    Raises:
        NoNamespaces: this machine does not permit namespaces.
    """
    mounts = [f"mount -t tmpfs tmpfs {shlex.quote(folder)}" for folder in private]
    with ExitStack() as stack:

        def hold(setup: Sequence[str]) -> _Holder:
            holder = _Holder(setup)
            stack.callback(holder.close)
            return holder

        switch = hold(["ip link add bridge type bridge", "ip link set bridge up"])
        made = []
        for index in range(count):
            holder = hold([f"hostname node{index}", *mounts])
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"node{index}-"))
            node = Node(index, holder, switch, Path(folder))
            node.connect()
            made.append(node)
        yield made


@functools.cache
def why_no_nodes() -> str | None:
    """Return why this machine cannot have nodes in namespaces; None if it can."""
    try:
        with nodes(1):
            return None
    except (NoNamespaces, OSError) as error:
        return f"no namespaces on this machine: {error}"
