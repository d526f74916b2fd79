"""The servers that ``make bench-serve`` compares, each in processes of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.serve_engine import ByteSource, PacedDeployment, PacedEngine
from benchmarks.serve_processes import (
    Server,
    free_port,
    pid_of,
    running,
    spawn,
    wait_for,
)
from dist_aclgraph.actors import processes
from dist_aclgraph.cli.serve import serve_in_processes
from dist_aclgraph.config import Config


@contextmanager
def plain(config: Config, directory: Path) -> Iterator[Server]:
    """``dist-aclgraph serve`` as it is, with its supervisor, in front of a paced engine."""
    engine = PacedEngine(directory)
    found = PacedDeployment(engine.address, config.max_model_len or 4096)
    config = config.model_copy(
        update={"serve": config.serve.model_copy(update={"port": free_port()})}
    )
    process = spawn.Process(target=_serve, args=(config, found))
    try:
        with running(process):
            wait_for(process, config.serve.port, "/ready")
            supervisor = pid_of(process)
            pids = supervisor, *sorted(processes.children(supervisor))
            yield Server("dist-aclgraph serve", config.serve.port, pids, engine)
    finally:
        engine.close()


def _serve(config: Config, found: PacedDeployment) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        serve_in_processes(config, lambda config, on_progress: found)


@contextmanager
def floor(frames: Sequence[bytes]) -> Iterator[Server]:
    """uvicorn with an application that sends these frames, one a step, and does nothing else."""
    ours, theirs = socket.socketpair()
    port = free_port()
    process = spawn.Process(target=_serve_frames, args=(port, frames, theirs))
    with ours, theirs, running(process):
        wait_for(process, port, "/ready")
        yield Server("bare uvicorn", port, (pid_of(process),), ByteSource(ours))


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
