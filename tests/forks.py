"""Starts processes that have torch and the emulator's libraries in memory from the start.

One server process forks these processes, so that they do not spend seconds on imports. The server
has opened no device and started no thread. Each process can have its own environment and its own
settings of the emulator.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path


def forks() -> ForkServerContext:
    """Return a multiprocessing context. The processes that it starts are forked from a server. The
    server starts together with the first of these processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def begin(environment: Mapping[str, str]) -> None:
    """Set the environment of a forked process. Variables that torch reads when it is imported have
    no effect.
    """
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))


def run_code(code: str, environment: Mapping[str, str], out: Path) -> None:
    """Run code as the main program of a forked process. Its stdout and stderr go to ``out``."""
    begin(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(write_through=True)
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()  # otherwise, a forked process would not call exit functions
