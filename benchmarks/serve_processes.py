"""Servers in processes of their own, as ``make bench-serve`` needs them."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from benchmarks.serve_engine import Source

START_S = 120.0
POLL_S = 0.05
EXIT_S = 20.0
spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Server:
    """A server that answers at ``port``. ``pids`` are the processes on a token's way."""

    name: str
    port: int
    pids: tuple[int, ...]
    source: Source


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(process: SpawnProcess) -> Iterator[None]:
    """Start a process; in the end it is told to stop, and killed where it does not."""
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
        RuntimeError: its process has ended.
        TimeoutError: it was not in time.
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
