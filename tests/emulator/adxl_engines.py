"""Programs with an engine (``adxl::AdxlEngine``), for tests. Each uses an emulated device."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch_npu

from dist_aclgraph.device import emulator
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ACL_HEADERS = Path(torch_npu.__file__).parent / "include/third_party/acl/inc"
MIB = 1 << 20
READ, WRITE = 0, 1
DEVICE, HOST = 0, 1
OK, INVALID, TIMEOUT, NOT_CONNECTED, ALREADY, UNSUPPORTED = (
    0,
    103900,
    103901,
    103902,
    103903,
    103905,
)
FAILED, EXHAUSTED = 503900, 203900
NO_POOL = "adxl.BufferPool=0:0"
LIMIT_S = 60
LONG_MS = 30_000


def build_program(folder: Path) -> Path:
    """Compile the program, and return its path. Skip the test if Linux forbids the transfers."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) > 1:
        pytest.skip(f"{scope} lets no process access the memory of another one")
    built = folder / "program"
    libraries = emulator.build()
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-Wno-deprecated-declarations"]
    command += [f"-I{ROOT / 'emulator/src'}", f"-I{ACL_HEADERS}", f"-I{ACL_HEADERS / 'acl'}"]
    command += [str(ROOT / "tests/emulator/data/adxl_program.cpp"), "-o", str(built)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-lllm_datadist", "-lmetadef", "-lascendcl"]
    subprocess.run(command, check=True)
    return built


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Engine:
    """A process that has one engine, on an emulated device."""

    def __init__(self, program: Path, settings: dict, environment: dict, device: int):
        words = {"devices": 4} | settings
        environment = {"EMULATED_NPU": " ".join(f"{k}={v}" for k, v in words.items())} | environment
        self.process = subprocess.Popen(
            [program],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = f"127.0.0.1:{free_port()}"
        self.text = ""
        self.wants("device", device)

    def answer(self, *words: object) -> list[int | str]:
        """Make the call that ``words`` describe; return its status and its values. Store the call's
        error message in ``text``.
        """
        assert self.process.stdin and self.process.stdout
        print(*words, file=self.process.stdin, flush=True)
        values, _, self.text = self.process.stdout.readline().rstrip("\n").partition("\t")
        return [int(word) if word.isdecimal() else word for word in values.split()]

    def status(self, *words: object) -> int:
        return int(self.answer(*words)[0])

    def wants(self, *words: object) -> list[int | str]:
        """Make a call, check that it succeeds, and return its values."""
        status, *values = self.answer(*words)
        assert status == OK, (words, status, self.text)
        return values

    def begin(self, *options: str) -> Engine:
        self.wants("init", self.name, NO_POOL, *options)
        return self

    def memory(self, num_bytes: int, value: int, kind: int = DEVICE) -> int:
        """Allocate, fill and register memory; return its address."""
        (address,) = self.wants("malloc_host" if kind == HOST else "malloc", num_bytes)
        self.wants("fill", address, num_bytes, value)
        self.wants("register", address, num_bytes, kind)
        return int(address)

    def bytes_at(self, address: int, num_bytes: int) -> str:
        """Return the bytes as runs: "7*100 9*20"."""
        return " ".join(map(str, self.wants("show", address, num_bytes)))

    def link(self, peer: Engine) -> None:
        self.wants("connect", peer.name, LONG_MS)

    def unlink(self, peer: Engine) -> None:
        self.wants("disconnect", peer.name, LONG_MS)

    def stop(self) -> None:
        """Stop all threads of the process with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: all(
                (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for thread in threads.iterdir()
            )
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def move(self, peer: Engine, operation: int, *spans: int, timeout_ms: int = LONG_MS) -> int:
        """Make a transfer, and return its status. Each span is a local address, a remote address
        and a length.
        """
        return self.status("transfer", peer.name, operation, timeout_ms, *spans)
