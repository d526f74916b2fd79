"""New processes that have torch and the emulator's libraries in memory from the start.

One server process, which has opened no device and started no thread, forks these processes. So the
new processes do not spend seconds on imports. Each process can have another environment and other
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
    """Return the context that forks processes from the server, which the first process starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def begin(environment: Mapping[str, str]) -> None:
    """Set the environment of a forked process, except variables that torch reads at import."""
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))


def run_code(code: str, environment: Mapping[str, str], out: Path) -> None:
    """Run code as the main program of a forked process; it writes stdout and stderr to ``out``."""
    begin(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(write_through=True)
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()  # a forked process does not call exit functions
