"""Mooncake's transfer engine for NPUs, unmodified, moves KV blocks between two emulated devices.

Mooncake's wheel calls CANN's libraries. So this test shows that a program of another project runs
on the emulated ``adxl``.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CLIENTS
from tests.ports import free_port

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
WHEEL = "mooncake-transfer-engine-npu"
BLOCK_BYTES = 32768
MOVED, PLACES = [200, 17, 18, 3], [5, 6, 7, 100]

# The program answers each line of its standard input with one line.
PROGRAM = """
import hashlib, json, sys
device, port, packages = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch, torch_npu
sys.path.append(packages)
from mooncake.engine import TransferEngine

torch.npu.set_device(device)
engine = TransferEngine()
assert engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "ascend", "") == 0
generator = torch.Generator().manual_seed(device)
values = torch.randint(-128, 128, (256, 32768), dtype=torch.int8, generator=generator)
blocks = values.npu()  # 8 MiB: an allocation of its own, at a multiple of 2 MiB
other = values.npu()
torch.npu.synchronize()
assert engine.register_memory(blocks.data_ptr(), blocks.numel()) == 0

def move(operation, name, mine, yours, length):
    call = getattr(engine, f"batch_transfer_sync_{operation}")
    return call(name, mine, yours, [length] * len(mine))

print("READY", json.dumps([f"127.0.0.1:{engine.get_rpc_port()}", blocks.data_ptr(),
                           other.data_ptr()]), flush=True)
for line in sys.stdin:
    call, *arguments = json.loads(line)
    if call == "digests":
        found = [hashlib.sha256(block.numpy().tobytes()).hexdigest() for block in blocks.cpu()]
    else:
        found = move(call, *arguments)
    print("ANSWER", json.dumps(found), flush=True)
"""


def packages() -> Path:
    """Return the folder of the installed wheel; skip the test if something that the wheel needs is
    missing.
    """
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            pytest.skip(f"{WHEEL} needs {library}: apt-get install {package}")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) > 1:
        pytest.skip(f"{scope} lets no process access the memory of another one")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = CLIENTS.parent / "lib" / version / "site-packages"
    if not (folder / "mooncake" / "ascend_transport.so").exists():
        pytest.skip(f"{WHEEL} for {version} is not in {CLIENTS.parent.name}; make setup-clients")
    return folder


class Peer:
    """A process with Mooncake's engine and 256 registered blocks of random bytes on a device."""

    def __init__(self, device: int, log: Path, **settings: object):
        environment = {name: str(settings.pop(name)) for name in list(settings) if name.isupper()}
        words = [f"--set={key}={value}" for key, value in {"devices": 2, **settings}.items()]
        command = [sys.executable, "-m", "dist_aclgraph.device.emulator", "run", *words, "--"]
        command += [sys.executable, "-u", "-c", PROGRAM, str(device), str(free_port())]
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, str(packages())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **environment},
                text=True,
            )

    def wait(self) -> Peer:
        self.name, self.blocks, self.unregistered = self._receive("READY")
        return self

    def _receive(self, word: str) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(word):
                return json.loads(line.removeprefix(word))
        raise AssertionError(self._log.read_text()[-4000:])

    def _ask(self, *words: object) -> Any:
        assert self.process.stdin
        print(json.dumps(words), file=self.process.stdin, flush=True)
        return self._receive("ANSWER")

    def digests(self) -> list[str]:
        return self._ask("digests")

    def move(
        self,
        operation: str,
        peer: Peer,
        mine: list[int],
        yours: list[int],
        length: int = BLOCK_BYTES,
    ) -> int:
        """Transfer ``length`` blocks, and return the status. ``mine`` and ``yours`` are offsets in
        blocks.
        """
        return self._ask(
            operation,
            peer.name,
            [self.blocks + BLOCK_BYTES * block for block in mine],
            [peer.blocks + BLOCK_BYTES * block for block in yours],
            length,
        )


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., list[Peer]]]:
    """Start one process for each device. The settings apply only to the first process. Settings
    with names in capitals are environment variables; all others are settings of the emulator.
    """
    peers: list[Peer] = []

    def started(*devices: int, **settings: object) -> list[Peer]:
        for number, device in enumerate(devices):
            found = settings if number == 0 else {}
            peers.append(Peer(device, tmp_path / str(number), **found))
        return [peer.wait() for peer in peers]

    yield started
    for peer in peers:
        peer.process.kill()
        peer.process.communicate()


def replaced(blocks: list[str], places: list[int], others: list[str], moved: list[int]):
    result = list(blocks)
    for place, block in zip(places, moved, strict=True):
        result[place] = others[block]
    return result


@pytest.mark.parametrize("variables", [{}, {"ASCEND_USE_ASYNC_TRANSFER": 1}])
def test_blocks_move_exactly_and_other_memory_is_refused(start, variables):
    reader, owner = start(1, 0, **variables)
    mine, yours = reader.digests(), owner.digests()

    assert reader.move("read", owner, PLACES, MOVED) == 0
    mine = replaced(mine, PLACES, yours, MOVED)
    assert (reader.digests(), owner.digests()) == (mine, yours)

    assert reader.move("write", owner, MOVED, PLACES) == 0
    yours = replaced(yours, PLACES, mine, MOVED)
    assert (reader.digests(), owner.digests()) == (mine, yours)

    outside = (owner.unregistered - owner.blocks) // BLOCK_BYTES
    assert reader.move("read", owner, [0, 1], [0, outside]) == -1
    assert reader.move("read", owner, [0], [255], 2 * BLOCK_BYTES) == -1
    outside = (reader.unregistered - reader.blocks) // BLOCK_BYTES
    assert reader.move("write", owner, [0, outside], [0, 1]) == -1
    assert (reader.digests(), owner.digests()) == (mine, yours)

    assert reader.move("read", owner, [9], [8]) == 0
    assert reader.digests()[9] == yours[8]


def test_a_killed_peer_fails_a_transfer_and_changes_nothing(start):
    reader, owner = start(1, 0)
    mine, yours = reader.digests(), owner.digests()
    assert reader.move("read", owner, [0], [1]) == 0
    owner.process.kill()
    owner.process.wait()

    assert reader.move("read", owner, PLACES, MOVED) == -1
    assert reader.digests() == replaced(mine, [0], yours, [1])


def test_a_link_that_fails_once_is_made_again(start):
    reader, owner = start(1, 0, fault_op="adxl_transfer", fault_call=3, fault_kind="link")
    mine, yours = reader.digests(), owner.digests()

    assert reader.move("read", owner, PLACES, MOVED) == 0  # Mooncake tries again
    assert reader.digests() == replaced(mine, PLACES, yours, MOVED)


def test_processes_of_one_device_are_not_linked(start):
    reader, owner = start(0, 0)
    mine = reader.digests()

    assert reader.move("read", owner, [0], [1]) == -1
    assert reader.digests() == mine
