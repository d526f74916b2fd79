"""Forking workers from one process that has loaded what takes seconds to load.

Importing Ray, torch and torch_npu keeps a core busy for seconds in every worker. Where a machine
has fewer cores than processes that are about to start, those wait for each other: there, one
process imports once, and the others are forked from it, then and whenever one is replaced. It
opens no device and has no thread, so what it forks is as good as new. Ray starts workers by
``fork_client.py`` then (``py_executable`` of their runtime environment), which hands over
arguments, environment and output; the rest is Ray's.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.run_directory import RunDirectory
from dist_aclgraph.config import Config
from dist_aclgraph.device.kind import DeviceKind, resolve_kind
from dist_aclgraph.environment import (
    JOB_VARIABLE,
    child_environment,
    fork_environment,
    ray_job,
    raylet_pid,
    take_over_environment,
)

CLIENT = Path(__file__).with_name("fork_client.py")
REQUEST_S, REQUEST_BYTES = 10.0, 4 << 20  # limits of what a client sends
STOP_S, LOOK_S = 5.0, 0.02
MODULES = (
    "ray._private.workers.default_worker",
    "dist_aclgraph.actors.controller.controller",
    "dist_aclgraph.actors.engine.engine",
    "dist_aclgraph.actors.worker.worker",
    "dist_aclgraph.comm.groups",
    "dist_aclgraph.engine.model_runner",
    "dist_aclgraph.models.checkpoint",
    "dist_aclgraph.models.decoder",
    "numpy.random",
)
CHUNK = 1 << 16


def is_crowded(num_processes: int) -> bool:
    """Whether so many processes, which start at once, would wait for this machine's cores."""
    return num_processes > len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ForkAddress:
    """A server as any process of this machine knows it, whoever owns it.

    Attributes:
        path: of its socket.
        start: of its process, see ``processes.start_of``.
        loaded: see ``_loaded_by``.
    """

    path: str
    pid: int
    start: int
    loaded: tuple[DeviceKind, dict[str, str]]

    @property
    def command(self) -> str:
        """What Ray starts a process with in place of Python."""
        return shlex.join([sys.executable, "-I", "-S", str(CLIENT), self.path])

    def serves(self, config: Config) -> bool:
        """Whether it runs, and has loaded what processes of this configuration load."""
        return self._lives and self.loaded == _loaded_by(config) and processes.is_running(self.pid)

    def end_forked(self) -> None:
        """Kill all that it has forked, and wait a while for their ends. Of a dead server, nobody
        knows.
        """
        until_s = time.monotonic() + STOP_S
        while self._lives and (forked := processes.children(self.pid)):
            processes.kill_all(forked)
            if time.monotonic() > until_s:
                return
            time.sleep(LOOK_S)

    @property
    def _lives(self) -> bool:
        return processes.start_of(self.pid) == self.start


class ForkServer:
    """Owns a server for processes of this machine; they outlive it."""

    def __init__(self, config: Config) -> None:
        loaded = _loaded_by(config)
        self._directory = RunDirectory()
        path = f"{self._directory.path}/forks"
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(socket.SOMAXCONN)
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        __name__,
                        str(listener.fileno()),
                        str(os.getpid()),
                        loaded[0],
                    ],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # libraries say things when they are loaded
                    env=fork_environment(config),
                    process_group=0,  # signals for the service are not for it
                )
        except BaseException:
            self._directory.remove()
            raise
        pid = self._process.pid
        self.address = ForkAddress(path, pid, processes.start_of(pid), loaded)

    def disown(self) -> None:
        """Leave it to the parent, in a process that was forked."""
        self._directory.disown()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)
        self._directory.remove()


def _loaded_by(config: Config) -> tuple[DeviceKind, dict[str, str]]:
    """Return what decides which libraries processes of a configuration load, and how."""
    return resolve_kind(config.device.kind), child_environment(config)


class Forks:
    """The server of this machine, from the first crowded start until the end. Any thread.

    Args:
        lent: of a process that outlives this one, which may be forked by it. It comes first for as
            long as it serves; behind it, there is one that belongs to this object.
    """

    def __init__(self, lent: ForkAddress | None = None) -> None:
        self._lent = lent
        self._is_forked = lent is not None
        self._server: ForkServer | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def address(self, config: Config, num_processes: int) -> ForkAddress | None:
        """Return what forks processes of a configuration; None where each loads for itself.

        Args:
            num_processes: that start at once.
        """
        with self._lock:
            if self._lent is not None and self._lent.serves(config):
                return self._lent
            if self._server is not None and not self._server.address.serves(config):
                self._drop()
            if self._server is None and is_crowded(num_processes) and not self._is_closed:
                self._server = ForkServer(config)
            return None if self._server is None else self._server.address

    def command(self, config: Config, num_processes: int) -> str | None:
        """Return what Ray starts a process with in place of Python; None for what it takes itself.

        To what a forked process starts Ray would hand on its own command: there Python is named.
        """
        found = self.address(config, num_processes)
        if found is not None:
            return found.command
        return shlex.quote(sys.executable) if self._is_forked else None

    def renew(self) -> None:
        """Have the next start find another server, as this one may hang."""
        with self._lock:
            self._lent = None
            self._drop()

    def end_forked(self) -> None:
        """Kill all that was forked."""
        with self._lock:
            lent, server = self._lent, self._server
        for address in (lent, None if server is None else server.address):
            if address is not None:
                address.end_forked()

    def disown(self) -> None:
        """Leave it to the parent, in a process that was forked."""
        if self._server is not None:
            self._server.disown()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class Request(msgspec.Struct):
    """What a process is started with."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


def load(kind: DeviceKind) -> None:
    """Import what workers and engines import on their way to serving; open no device."""
    from dist_aclgraph.device.npu import load_torch_npu

    load_torch_npu(kind)
    for name in MODULES:
        importlib.import_module(name)


def serve(listener: socket.socket, parent: int) -> tuple[Request, list[int]] | None:
    """Fork a process for each client.

    Args:
        parent: a handle of the process that started this one, with which it ends.

    Returns:
        In each of them, what it was started with, and its standard streams; in the server None,
        when the process that started it has ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while parent not in dict(poll.poll()):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(REQUEST_S)
            try:
                request, streams = _receive(connection)
            except (OSError, ValueError):
                continue  # the client sees it, and helps itself
            is_ours = request.environment.get(JOB_VARIABLE, ray_job()) == ray_job()
            # One that has waited for too long has helped itself.
            pid = _fork() if is_ours and not _has_left(connection) else -1
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(parent)
                return request, streams
            if pid > 0:
                try:
                    connection.send(b"\n")
                except OSError:  # it has left meanwhile
                    os.kill(pid, signal.SIGKILL)
            for fd in streams:
                os.close(fd)
    return None


def _has_left(client: socket.socket) -> bool:
    poll = select.poll()
    poll.register(client, 0)  # a hang-up is told unasked
    return bool(poll.poll(0))


def _fork() -> int:
    """As ``os.fork``, or -1 where the system has no room: the client helps itself then."""
    try:
        return os.fork()
    except OSError as e:
        print(f"no worker can be forked: {e}", file=sys.stderr)
        return -1


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Raises: OSError, ValueError: it is no request."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    try:
        data = b""
        while (chunk := connection.recv(CHUNK)) and len(data) <= REQUEST_BYTES:
            data += chunk
        return msgspec.json.decode(data, type=Request), streams
    except (OSError, ValueError):
        for fd in streams:
            os.close(fd)
        raise


def become(request: Request, streams: list[int]) -> None:
    """Run the program that a client was started for, as if Python had been started with it."""
    os.setpgid(0, 0)
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    take_over_environment(request.environment)
    if raylet_pid() is not None:
        processes.leave_with_raylet()
    _read_again()
    os.chdir(request.folder)
    sys.argv[:] = request.arguments
    runpy.run_path(request.arguments[0], run_name="__main__")


def _read_again() -> None:
    """Have Ray's native part read its variables: it has read those of the server."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # it is compiled

    Config.initialize("")


def main() -> None:
    """Load, then fork for whoever asks at the socket that was inherited."""
    started_by, kind = int(sys.argv[2]), sys.argv[3]
    parent = os.pidfd_open(os.getppid())
    if os.getppid() != started_by:
        return  # it is gone already, and whoever adopted this process may live for ever
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        load("npu" if kind == "npu" else "emulated")
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return  # a library has started a thread, which a forked process would lack
        gc.collect()
        gc.freeze()  # collections in forked processes leave shared memory alone
        forked = serve(listener, parent)
    if forked is not None:
        become(*forked)


if __name__ == "__main__":
    main()
