"""The emulator, strict, in the test process; what kills a process runs in one of its own."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"devices": 4, "cann": "9.0.0"}  # test_cann_lines tries 8.5 as well

PROLOGUE = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from dist_aclgraph.device import emulator
emulator.load(json.loads(os.environ["SCRIPT_SETTINGS"]))
import torch, torch_npu
import torch.distributed as dist
rank = int(os.environ.get("RANK", 0))
torch.npu.set_device(rank)
"""


# At import, because test modules import torch_npu.
emulator.build()
emulator.load(SETTINGS)


def _start(code: str, settings: dict, environment: dict[str, str]) -> subprocess.Popen:
    settings = {"cann": SETTINGS["cann"]} | settings
    program = PROLOGUE.format(root=str(ROOT)) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        env={**os.environ, "SCRIPT_SETTINGS": json.dumps(settings), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen, timeout_s: float) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return -9, process.communicate()[0] + "\nkilled after the time limit"
    return process.returncode, output


@pytest.fixture
def run_script() -> Callable[..., tuple[int, str]]:
    """Run code in a fresh process and return (exit status, output)."""

    def run(code: str, timeout_s: float = 90, **settings) -> tuple[int, str]:
        return _finish(_start(code, settings, {"TASK_QUEUE_ENABLE": "0"}), timeout_s)

    return run


@pytest.fixture
def run_ranks() -> Callable[..., list[tuple[int, str]]]:
    """Run code once for each rank and return (exit status, output) of each."""

    def run(code: str, ranks: int, timeout_s: float = 120, **settings) -> list[tuple[int, str]]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"TASK_QUEUE_ENABLE": "0", "OMP_NUM_THREADS": "1"}
        processes = [_start(code, settings, {**shared, "RANK": str(r)}) for r in range(ranks)]
        return [_finish(process, timeout_s) for process in processes]

    return run
