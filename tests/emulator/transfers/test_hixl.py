"""CANN's Python package ``hixl`` on the emulated NPU. Names of classes and functions are those of
CANN's sources.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

PROGRAM = Path(__file__).parents[1] / "data" / "hixl_program.py"
RUN = [sys.executable, "-m", "dist_aclgraph.device.emulator", "run"]
NO_POOL = "{hixl.OPTION_BUFFER_POOL: '0:0'}"
KIB = 1024
OK, INVALID, TIMEOUT, NOT_CONNECTED, UNSUPPORTED = 0, 103900, 103901, 103902, 103905
FAILED = 503900


class Program:
    """A process of ``hixl_program``, on an emulated device of an emulated host."""

    def __init__(self, host: str, **settings: object) -> None:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and int(scope.read_text()) > 1:
            pytest.skip(f"{scope} lets no process access the memory of another one")
        words = [f"--set={key}={value}" for key, value in {"host": host, **settings}.items()]
        self.process = subprocess.Popen(
            [*RUN, *words, "--", sys.executable, "-u", str(PROGRAM), "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = f"127.0.0.1:{free_port()}"

    def ask(self, expression: str) -> Any:
        assert self.process.stdin and self.process.stdout
        print(expression, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("VALUE "):
                return ast.literal_eval(line.removeprefix("VALUE "))
        raise AssertionError(f"the program has ended at {expression}")

    def begin(self) -> Program:
        assert self.ask(f"engine.initialize({self.name!r}, {NO_POOL})") == OK
        return self

    def memory(self, value: int) -> int:
        address = self.ask(f"host_memory({64 * KIB}, {value})")
        status, _ = self.register(address)
        assert status == OK
        return address

    def register(self, address: int) -> tuple[int, int]:
        return self.ask(
            f"engine.register_mem(hixl.MemDesc({address}, {64 * KIB}), hixl.MemType.MEM_HOST)"
        )

    def read(self, peer: Program, mine: int, yours: int, count: int, limit_ms: int = 30_000) -> int:
        span = f"hixl.TransferOpDesc(local_addr={mine}, remote_addr={yours}, len={count})"
        words = f"{peer.name!r}, hixl.TransferOp.READ, [{span}], timeout_in_millis={limit_ms}"
        return self.ask(f"engine.transfer_sync({words})")


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    with contextlib.ExitStack() as stack:

        def begun(host: str, **settings: object) -> Program:
            made = Program(host, **settings)
            stack.callback(made.process.communicate)
            stack.callback(made.process.kill)
            return made

        yield begun


def test_bytes_are_read_between_hosts_and_failures_are_statuses(start) -> None:
    a, b = start("a").begin(), start("b").begin()
    mine, yours = a.memory(1), b.memory(2)

    assert a.read(b, mine, yours, 10) == NOT_CONNECTED
    assert a.ask(f"engine.connect({b.name!r}, timeout_in_millis=30000)") == OK
    assert a.read(b, mine, yours, 10) == OK
    assert a.ask(f"ctypes.string_at({mine}, 12)") == bytes([2] * 10 + [1] * 2)
    assert a.read(b, mine, yours, 65 * KIB) == INVALID

    word = f"[hixl.TransferOpDesc({mine + 20}, {yours}, 5)]"
    status, request = a.ask(f"engine.transfer_async({b.name!r}, hixl.READ, {word})")
    assert status == OK and request
    while (found := a.ask(f"engine.get_transfer_status({request})[1].name")) == "WAITING":
        pass
    assert found == "COMPLETED"
    assert a.ask(f"ctypes.string_at({mine + 20}, 6)") == bytes([2] * 5 + [1])

    assert a.ask(f"engine.disconnect({b.name!r}, 30000)") == OK
    assert a.ask(f"engine.disconnect({b.name!r}, 30000)") == NOT_CONNECTED
    assert a.ask("engine.finalize()") is None
    assert a.register(mine)[0] == FAILED


def test_a_late_transfer_writes_until_the_link_is_closed(start) -> None:
    stall = {"fault_op": "adxl_transfer", "fault_kind": "stall", "stall_s": 3600}
    a, b = start("a", **stall).begin(), start("b").begin()
    mine, yours = a.memory(1), b.memory(2)
    assert a.ask(f"engine.connect({b.name!r}, 30000)") == OK

    assert a.read(b, mine, yours, 10, limit_ms=100) == TIMEOUT
    assert a.read(b, mine, yours, 10) == FAILED
    assert a.ask(f"engine.disconnect({b.name!r}, 30000)") == OK
    assert a.ask(f"ctypes.string_at({mine}, 3)") == bytes([1, 1, 1])


def test_arguments_are_as_strict_as_those_of_pybind11(start) -> None:
    a = start("a")

    assert a.ask("engine.register_mem(hixl.MemDesc(64, 64), hixl.MEM_HOST)") == (FAILED, 0)
    a.begin()
    assert a.ask(f"engine.initialize('else', {NO_POOL})") == OK  # a second call has no effect
    mine = a.memory(1)
    assert a.register(mine) == a.register(mine), "a range is registered once"
    for call in (
        f"engine.register_mem(hixl.MemDesc({mine}, 8), 1)",
        f"engine.register_mem(mem_desc=hixl.MemDesc({mine}, 8), mem_type=hixl.MEM_HOST)",
        "engine.register_mem(hixl.MemDesc(-1, 8), hixl.MEM_HOST)",
        f"engine.transfer_sync('127.0.0.1:1', 0, [hixl.TransferOpDesc({mine}, {mine}, 8)])",
        f"engine.transfer_sync('127.0.0.1:1', hixl.READ, [({mine}, {mine}, 8)])",
        "engine.connect('127.0.0.1:1', 1 << 31)",
    ):
        assert str(a.ask(call)).startswith("TypeError"), call
    assert a.ask("hixl.get_capability(hixl.AUTO_CONNECT)") == (OK, 1)
    assert a.ask("engine.get_notifies()") == (UNSUPPORTED, [])
    assert a.ask("hixl.Hixl().initialize('0.0.0.0:80', {})") in (INVALID, UNSUPPORTED)
