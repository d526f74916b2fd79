"""Fresh processes that have torch and the emulator's libraries in memory from the start.

They are forked from one server process that has touched no device and started no thread, which
spares each of them the seconds that loading takes. Settings of the emulator and the environment
are each process's own.
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
    """Return the context whose processes come from the server, which starts with the first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def begin(environment: Mapping[str, str]) -> None:
    """Take over an environment, in a forked process. Variables that torch reads while it is loaded
    are set already.
    """
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))


def run_code(code: str, environment: Mapping[str, str], out: Path) -> None:
    """Run code as the program of this forked process; both its outputs go to the file ``out``."""
    begin(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(write_through=True)
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
    atexit._run_exitfuncs()  # as a program's end does, and a forked process's does not
