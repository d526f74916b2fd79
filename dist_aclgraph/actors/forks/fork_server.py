"""Forks workers from one process that has imported the libraries of workers.

The import of Ray, torch and torch_npu keeps a core busy for seconds in every worker. If more
processes start than the machine has cores, the processes compete for the cores. On such a machine,
the fork server imports the libraries once. Then all workers are forked from the server, including
workers that later replace dead workers. The server opens no device and has no threads, so a forked
process is like a new process. Ray's setting ``py_executable`` makes Ray start ``fork_client.py``
instead of Python. ``fork_client.py`` sends its arguments, environment and output streams to the
server.
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
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.liveness import leave_with_raylet
from dist_aclgraph.actors.host.run_directory import RunDirectory
from dist_aclgraph.config import Config
from dist_aclgraph.environment import (
    RAYLET_VARIABLE,
    child_environment,
    python_environment,
    raylet_pid,
    take_over_environment,
)
from dist_aclgraph.version import build

CLIENT = Path(__file__).with_name("fork_client.py")
# The time limit in seconds and the size limit in bytes of a client's request.
REQUEST_S, REQUEST_BYTES = 10.0, 4 << 20
STOP_S, LOOK_S = 5.0, 0.02
# Ray's native library reads two environment variables only once, when the server loads the library.
# One is the id of the Ray job. The server can start before Ray, when no job exists. So the server
# sets the id of Ray's first job, and forks only processes of this job. The other variable is the
# process id of the raylet that the library watches. Forked processes watch their raylets without
# the library. To turn off the library's watch, the server sets this variable to the id of a process
# that never ends.
JOB_VARIABLE = "RAY_JOB_ID"
SERVER_VARIABLES = {JOB_VARIABLE: "01000000", RAYLET_VARIABLE: "1"}
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


@dataclass(frozen=True)
class ForkAddress:
    """The data with which other processes of this machine reach a fork server.

    Attributes:
        path: path of the server's socket.
        start: start time of the server's process; see ``processes.start_of``.
        variables: the server's environment variables that change how libraries are loaded.
    """

    path: str
    pid: int
    start: int
    variables: dict[str, str]

    @property
    def command(self) -> str:
        """The command that Ray runs instead of Python to start a process."""
        return shlex.join([sys.executable, "-I", "-S", str(CLIENT), self.path])

    def serves(self, config: Config) -> bool:
        """Return whether the server runs, and has loaded the libraries for this configuration."""
        is_alike = self.variables == child_environment(config)
        return self._lives and is_alike and processes.is_running(self.pid)

    def end_forked(self) -> None:
        """Kill the processes that the server has forked, and wait some seconds for their end.

        After the server's death, the forked processes cannot be found, and this method does
        nothing.
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
    """Owns a server that forks processes on this machine. These processes outlive the server."""

    def __init__(self, config: Config) -> None:
        variables = SERVER_VARIABLES | python_environment(config)
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
                        variables[JOB_VARIABLE],
                    ],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    # hides the messages that libraries print when they are loaded
                    stdout=subprocess.DEVNULL,
                    env=variables,
                    process_group=0,  # signals for the service's group must not reach the server
                )
        except BaseException:
            self._directory.remove()
            raise
        pid = self._process.pid
        start = processes.start_of(pid)
        self.address = ForkAddress(path, pid, start, child_environment(config))

    def disown(self) -> None:
        """To be called in a forked process. The parent process stays the owner of the server."""
        self._directory.disown()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)
        self._directory.remove()


class ForkRequest(msgspec.Struct):
    """The arguments, folder and environment of a process to fork."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


def load() -> None:
    """Import all modules that workers and engines import before they serve. Open no device."""
    from dist_aclgraph.device.npu import load_torch_npu

    load_torch_npu("emulated")
    for name in MODULES:
        importlib.import_module(name)
    build()  # compute the hash of the sources now, because the files can change later


def serve(listener: socket.socket, parent: int, job: str) -> tuple[ForkRequest, list[int]] | None:
    """Fork a process for each client.

    Args:
        parent: handle of the process that started the server; the server ends when this process
            ends.
        job: id of a Ray job. The server forks only processes of this job.

    Returns:
        In each forked process: the client's request and standard streams. In the server: None,
        after the parent has ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes that end do not become zombies
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
                continue  # the client gets no response, and replaces itself by a new Python
            is_ours = request.environment.get(JOB_VARIABLE, job) == job
            # If the client has left, it waited too long, and has replaced itself by a new Python.
            pid = _fork() if is_ours and not _has_left(connection) else -1
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(parent)
                return request, streams
            if pid > 0:
                try:
                    connection.send(b"\n")
                except OSError:  # the client has disconnected in the meantime
                    os.kill(pid, signal.SIGKILL)
            for fd in streams:
                os.close(fd)
    return None


def _has_left(client: socket.socket) -> bool:
    poll = select.poll()
    poll.register(client, 0)  # poll reports a disconnected client even with an empty event mask
    return bool(poll.poll(0))


def _fork() -> int:
    """Call ``os.fork``. Return -1 if the system refuses; the client then starts a new Python."""
    try:
        return os.fork()
    except OSError as e:
        print(f"no worker can be forked: {e}", file=sys.stderr)
        return -1


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]]:
    """Return a client's request and streams.

    Raises:
        OSError, ValueError: the request is invalid.
    """
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    try:
        data = b""
        while (chunk := connection.recv(CHUNK)) and len(data) <= REQUEST_BYTES:
            data += chunk
        return msgspec.json.decode(data, type=ForkRequest), streams
    except (OSError, ValueError, RecursionError) as e:
        for fd in streams:
            os.close(fd)
        raise ValueError(f"the request is invalid: {e}") from e


def become(request: ForkRequest, streams: list[int]) -> None:
    """Run the client's program in this process, as a new Python process would run it."""
    os.setpgid(0, 0)
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    take_over_environment(request.environment)
    if raylet_pid() is not None:
        leave_with_raylet()
    _read_again()
    os.chdir(request.folder)
    sys.argv[:] = request.arguments
    runpy.run_path(request.arguments[0], run_name="__main__")


def _read_again() -> None:
    """Let Ray's native library read the variables of this process instead of the server's."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # the module is compiled

    Config.initialize("")


def main() -> None:
    """Load the libraries, then fork a process for each client of the inherited socket."""
    started_by = int(sys.argv[2])
    parent = os.pidfd_open(os.getppid())
    if os.getppid() != started_by:
        return  # the parent has ended already
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        # Garbage collections during the import take a third of the import time, but free no
        # imported object.
        gc.disable()
        load()
        # A fork copies no other threads. So the server ends if a library has started a thread.
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return
        gc.collect()
        # Garbage collections in forked processes skip these objects, so the memory stays shared.
        gc.freeze()
        gc.enable()
        forked = serve(listener, parent, sys.argv[3])
    if forked is not None:
        become(*forked)


if __name__ == "__main__":
    main()
