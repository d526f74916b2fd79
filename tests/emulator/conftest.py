"""Fixtures for tests of the emulator. The tests' own process uses the emulator in strict mode.

Code that ends its process, or needs other settings, runs in another process.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator
from tests.emulator.modelled_time import HELPERS
from tests.forks import forks, run_code
from tests.ports import free_port
from tools.namespaces import Node

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"devices": 4, "cann": "9.0.0"}  # test_cann_lines.py also tests 8.5

PROLOGUE = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from dist_aclgraph.device import emulator
emulator.load(json.loads(os.environ["SCRIPT_SETTINGS"]))
import torch, torch_npu
import torch.distributed as dist
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
torch.npu.set_device(rank)
"""


def pytest_configure(config: pytest.Config) -> None:
    """Load the emulator before pytest imports the test modules, which import torch_npu.

    If pytest runs with ``-n``, xdist's worker processes run the tests, so the main process loads
    nothing.
    """
    emulator.build()
    has_others = config.getoption("tx", None) and not hasattr(config, "workerinput")
    if has_others and not config.option.collectonly:
        return
    emulator.load(SETTINGS)
    import torch_npu

    # With a task queue, torch_npu has a thread that wakes up ten thousand times a second, even if
    # nothing runs. So the queue is off here; test_task_queue.py tests it in other processes.
    # torch_npu reads the variable once, at the call below. Later, the fixture ``clean_environment``
    # removes the variable. Older release series of torch_npu lack this call, so their queue stays
    # on.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    getattr(torch_npu._C, "_npu_get_task_queue_enable", lambda: 0)()


class Script:
    """A running program. Its process is usually forked. Tests of imports and of process exits start
    a new process instead.

    If a node is given, the program is not forked, but started in the network namespace of this
    node.
    """

    def __init__(
        self,
        code: str,
        settings: dict,
        environment: dict,
        out: Path,
        fresh: bool,
        node: Node | None = None,
    ):
        import torch

        if "torch.npu._sleep" in code and not hasattr(torch.npu, "_sleep"):
            pytest.skip("torch_npu has _sleep from 2.13 on")
        program = PROLOGUE.format(root=str(ROOT)) + textwrap.dedent(code)
        settings = {"cann": SETTINGS["cann"]} | settings
        environment = {"SCRIPT_SETTINGS": json.dumps(settings), **environment}
        environment = {"TASK_QUEUE_ENABLE": "0"} | environment
        self._out = out
        if fresh or node:
            start = node.start if node else subprocess.Popen
            with out.open("w") as file:
                self._process = start(
                    [sys.executable, "-u", "-c", program],
                    env={**os.environ, **environment},
                    stdout=file,
                    stderr=file,
                )
        else:
            arguments = (program, environment, out)
            self._process = forks().Process(target=run_code, args=arguments, daemon=True)
            self._process.start()

    def output(self) -> str:
        """Return what the program has printed up to now."""
        return self._out.read_text() if self._out.exists() else ""

    def finish(self, timeout_s: float) -> tuple[int, str]:
        """Wait for the end of the script; kill it after ``timeout_s`` seconds. Return (exit status,
        output).
        """
        status = self._wait(timeout_s)
        if status is None:
            self._process.kill()
            self._wait(timeout_s)
            return -9, self._out.read_text() + "\nkilled after the time limit"
        return status, self._out.read_text()

    def _wait(self, timeout_s: float) -> int | None:
        if not isinstance(self._process, subprocess.Popen):
            self._process.join(timeout_s)
            return self._process.exitcode
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


@pytest.fixture
def run_script(tmp_path_factory) -> Callable[..., tuple[int, str]]:
    """Run code in a separate process and return (exit status, output).

    The process is forked from a process that has already imported all packages. If ``fresh`` is
    set, the process is not forked, but started.
    """

    def run(
        code: str,
        timeout_s: float = 90,
        *,
        fresh: bool = False,
        environment: dict[str, str] | None = None,
        **settings,
    ) -> tuple[int, str]:
        out = tmp_path_factory.mktemp("script") / "out"
        return Script(code, settings, environment or {}, out, fresh).finish(timeout_s)

    return run


@pytest.fixture
def hosts() -> str:
    """Return the letters that name the emulated hosts of the ranks, in the order of the ranks.

    The letters are repeated if there are more ranks than letters.
    """
    return "a"


@pytest.fixture
def start_ranks(tmp_path_factory, hosts) -> Callable[..., list[Script]]:
    """Start code once for each rank. If nodes are given, each gets the same number of ranks."""

    def start(
        code: str,
        ranks: int,
        *,
        fresh: bool = False,
        environment: dict[str, str] | None = None,
        hosts: str = hosts,
        nodes: Sequence[Node] = (),
        **settings,
    ) -> list[Script]:
        port = str(free_port())
        folder = tmp_path_factory.mktemp("ranks")
        address = nodes[0].address if nodes else "127.0.0.1"
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
        if not nodes:
            shared["HCCL_IF_IP"] = address
        return [
            Script(
                code,
                settings | {"host": hosts[r % len(hosts)]},
                {**shared, **(environment or {}), "RANK": str(r)},
                folder / str(r),
                fresh,
                nodes[r * len(nodes) // ranks] if nodes else None,
            )
            for r in range(ranks)
        ]

    return start


@pytest.fixture
def run_ranks(start_ranks) -> Callable[..., list[tuple[int, str]]]:
    """Run code once for each rank and return (exit status, output) of each."""

    def run(code: str, ranks: int, timeout_s: float = 120, **options) -> list[tuple[int, str]]:
        return [script.finish(timeout_s) for script in start_ranks(code, ranks, **options)]

    return run


@pytest.fixture
def told(run_script):
    """Run code on a device with modelled time, and return the values that it prints with
    ``print_json``.
    """

    def run(code, **settings):
        settings = {"kernels": "timed", "strict": False} | settings
        status, output = run_script(HELPERS + textwrap.dedent(code), **settings)
        assert status == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("JSON ")]
        return json.loads(line.removeprefix("JSON "))

    return run
