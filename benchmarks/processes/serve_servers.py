"""The servers that ``make bench-serve`` compares, each in separate processes."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.processes.serve_engine import ByteSource, PacedDeployment, PacedEngine, Source
from dist_aclgraph.actors.host import processes
from dist_aclgraph.cli.serve import serve_in_processes
from dist_aclgraph.cli.supervise import INGRESS
from dist_aclgraph.config import Config

START_S = 120.0
POLL_S = 0.05
EXIT_S = 20.0
spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Server:
    """A server that listens at ``ports``. ``pids`` are the ids of the processes through which a
    token passes.

    ``ingresses`` are the ids of the ingress processes of ``dist-aclgraph serve``; () for other
    servers.
    """

    name: str
    ports: tuple[int, ...]
    pids: tuple[int, ...]
    source: Source
    ingresses: tuple[int, ...] = ()


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free ports."""
    while True:
        with ExitStack() as stack:
            first, *others = (stack.enter_context(socket.socket()) for _ in range(count))
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError):
                for place, probe in enumerate(others, port + 1):
                    probe.bind(("127.0.0.1", place))
                return port


@contextmanager
def running(process: SpawnProcess) -> Iterator[None]:
    """Start a process. When the context ends, stop the process, and kill it if necessary."""
    process.start()
    try:
        yield
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join(EXIT_S)
        process.kill()


def pid_of(process: SpawnProcess) -> int:
    assert process.pid is not None
    return process.pid


def wait_for(process: SpawnProcess, port: int, path: str) -> None:
    """Return when the server is ready.

    Raises:
        RuntimeError: the server's process has ended.
        TimeoutError: the server was not ready in time.
    """
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if not process.is_alive():
            raise RuntimeError(f"the server for port {port} ended with code {process.exitcode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)
    raise TimeoutError(f"the server at port {port} was not ready within {START_S:g} s")


@contextmanager
def plain(config: Config, directory: Path, num_ingresses: int = 1) -> Iterator[Server]:
    """Run ``dist-aclgraph serve`` as it is, with its supervisor, in front of a paced engine."""
    engine = PacedEngine(directory)
    found = PacedDeployment(engine.address, config.max_model_len or 4096)
    first = free_port(num_ingresses)
    keys = {"port": first, "replicas": num_ingresses}
    config = config.model_copy(update={"serve": config.serve.model_copy(update=keys)})
    ports = tuple(range(first, first + num_ingresses))
    process = spawn.Process(target=_serve, args=(config, found))
    try:
        with running(process):
            for port in ports:
                wait_for(process, port, "/ready")
            supervisor = pid_of(process)
            others = sorted(processes.children(supervisor))
            ingresses = tuple(pid for pid in others if processes.name_of(pid) == INGRESS)
            name = "dist-aclgraph serve"
            yield Server(name, ports, (supervisor, *others), engine, ingresses)
    finally:
        engine.close()


def _serve(config: Config, found: PacedDeployment) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        serve_in_processes(config, lambda config, **options: found)


@contextmanager
def floor(frames: Sequence[bytes]) -> Iterator[Server]:
    """Run uvicorn with an application that only sends these frames, one at each step."""
    ours, theirs = socket.socketpair()
    port = free_port()
    process = spawn.Process(target=_serve_frames, args=(port, frames, theirs))
    with ours, theirs, running(process):
        wait_for(process, port, "/ready")
        yield Server("bare uvicorn", (port,), (pid_of(process),), ByteSource(ours))


def _serve_frames(port: int, frames: Sequence[bytes], steps: socket.socket) -> None:
    streams: set[asyncio.Queue[None]] = set()
    steps.setblocking(False)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]

    def take_steps() -> None:
        for _ in steps.recv(4096):
            for stream in streams:
                stream.put_nowait(None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().add_reader(steps, take_steps)
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "POST":
            stream: asyncio.Queue[None] = asyncio.Queue()
            streams.add(stream)
            steps.send(b"\0")
            for frame in frames:
                await stream.get()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            streams.remove(stream)
        await send({"type": "http.response.body"})

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", log_config=None, access_log=False)
