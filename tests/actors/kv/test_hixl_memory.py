"""Memory into which a worker reads files over HIXL. The tests use a fake HIXL engine with the worst
behaviour that CANN allows: a failed transfer can still write until its link has ended, and the end
of a link can fail.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dist_aclgraph.actors.wire.addresses import Listener
from dist_aclgraph.actors.wire.lent_files import IDLE_S, LentFile, ReadError
from dist_aclgraph.actors.worker.hixl_memory import HixlMemory
from dist_aclgraph.actors.worker.node_files import NodeFiles, NodeFilesSettings
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, DeviceError, PlacementError, WorkerError
from dist_aclgraph.kv.arena import ALIGNMENT, Slot
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.planning.budget import MAX_LINKS
from tests.actors.fetched_files import MODEL, TOKEN
from tests.actors.kv_sockets import free_ports
from tests.actors.leftovers import wait_until
from tests.ports import free_port

LOOPBACK, PART, WAIT_S = "127.0.0.1", 4 * ALIGNMENT, 60.0


@dataclass
class FakeMemory:
    """Stands for pinned memory. Its address is not valid in this process."""

    num_bytes: int = 2 * PART
    address: int = 1 << 40
    view: memoryview = field(init=False)
    is_freed: bool = False

    def __post_init__(self) -> None:
        self.view = memoryview(bytearray(self.num_bytes))

    def free(self) -> None:
        self.is_freed = True


class FakeHixl:
    """A fake HIXL engine. In the file of a source, each byte is ``lent.address % 256``.

    Attributes:
        fails: names of the calls that fail until a test changes this set.
        problems: descriptions of calls that broke a rule of HIXL.
        writers: for each link, the slots of memory to which the link's failed transfers may still
            write.
        log: the calls so far.
    """

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self.fails: set[str] = set()
        self.problems: list[str] = []
        self.writers: dict[str, list[Slot]] = {}
        self.lost: list[Slot] = []
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _call(self, call: str, name: str = "") -> None:
        self.log.append(f"{call} {name}".strip())
        self.threads.add(threading.get_ident())
        assert self.goes_on.wait(WAIT_S)
        if call in self.fails:
            raise DeviceError(f"{call} fails")

    def listen(self, name: str, memory: Any) -> None:
        assert memory is self._memory
        self._call("listen")

    def connect(self, name: str, timeout_s: float) -> None:
        self._call("connect", name)
        if name in self.writers:
            self.problems.append(f"a second link to {name}")
        self.writers[name] = []

    def read(self, name: str, address: int, remote: int, num_bytes: int, timeout_s: float) -> None:
        if name not in self.writers:
            self.problems.append(f"no link to {name}")
        start = address - self._memory.address
        slot = Slot(start, start + num_bytes)
        for other in (*self.lost, *(each for slots in self.writers.values() for each in slots)):
            if not (slot.end <= other.start or other.end <= slot.start):
                self.problems.append(f"a late transfer may write to {other}, and {slot} is read")
        try:
            self._call("read", name)
        except DeviceError:
            self.writers[name].append(slot)
            raise
        self._memory.view[slot.start : slot.end] = bytes([remote % 256]) * num_bytes

    def disconnect(self, name: str, timeout_s: float) -> None:
        slots = self.writers.pop(name, None)
        try:
            self._call("disconnect", name)
            if slots is None:
                raise DeviceError("no link")
        except DeviceError:
            self.lost += slots or []
            raise

    def close(self) -> None:
        self._call("close")


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.memory = FakeMemory()
        self.hixl = FakeHixl(self.memory)
        self.files = HixlMemory(
            self.memory,  # type: ignore[arg-type]
            lambda: self.hixl,
            LOOPBACK,
            None,
            WAIT_S,
            part_bytes=PART,
            clock=lambda: self.now_s,
        )

    def read(self, value: int, engine: str = "b:1", num_bytes: int = ALIGNMENT) -> bytes:
        with self.files.read(LentFile(engine, 512 + value, num_bytes)) as file:
            return bytes(file)

    def close(self) -> None:
        self.files.close(WAIT_S)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
    assert not made.hixl.problems


def test_files_are_read_over_one_link_by_one_thread(world: World) -> None:
    assert [world.read(value) for value in (1, 2)] == [bytes([v]) * ALIGNMENT for v in (1, 2)]
    assert world.read(3, "c:1", PART) == bytes([3]) * PART
    assert world.hixl.log == [
        "listen", "connect b:1", "read b:1", "read b:1", "connect c:1", "read c:1",
    ]  # fmt: skip
    host, port = world.files.engine.split(":")
    assert host == LOOPBACK and int(port) > 0
    lender = world.files.lender
    assert lender.arena.take(PART) == Slot(0, PART), "the other part is for reads"
    world.close()
    assert world.hixl.log[6:] == ["disconnect b:1", "disconnect c:1", "close"]
    assert len(world.hixl.threads) == 1 and world.memory.is_freed
    with pytest.raises(ReadError):
        world.read(1)


def test_a_slot_is_used_again_only_after_its_link_has_ended(world: World) -> None:
    world.hixl.fails = {"read"}
    with pytest.raises(ReadError, match="read fails"):
        world.read(1, num_bytes=PART)
    assert world.hixl.log[-1] == "disconnect b:1"
    world.hixl.fails = set()
    assert world.read(2, num_bytes=PART) == bytes([2]) * PART
    assert world.hixl.log[-2:] == ["connect b:1", "read b:1"]


def test_a_slot_whose_link_does_not_end_is_lost(world: World) -> None:
    world.hixl.fails = {"read", "disconnect"}
    with pytest.raises(ReadError):
        world.read(1, num_bytes=ALIGNMENT)
    assert world.files.num_lost == 1
    world.hixl.fails = set()
    with pytest.raises(ReadError, match="no room"):
        world.read(2, num_bytes=PART)
    assert world.read(2, num_bytes=PART - ALIGNMENT) == bytes([2]) * (PART - ALIGNMENT)
    world.close()
    assert not world.memory.is_freed, "a late transfer may still write"


def test_a_link_that_cannot_be_made_loses_no_slot(world: World) -> None:
    world.hixl.fails = {"connect"}
    for _ in range(5):
        with pytest.raises(ReadError, match="connect fails"):
            world.read(1, num_bytes=PART)
    world.hixl.fails = set()
    assert world.read(2, num_bytes=PART) == bytes([2]) * PART
    assert world.files.num_lost == 0


def test_links_are_limited_and_unused_links_end(world: World) -> None:
    names = [f"b:{index}" for index in range(MAX_LINKS + 1)]
    for name in names[:-1]:
        world.read(1, name)
    world.read(1, names[0])
    world.read(1, names[-1])
    assert world.hixl.log[-3:] == [f"disconnect {names[1]}", f"connect {names[-1]}",
                                   f"read {names[-1]}"]  # fmt: skip
    world.now_s += IDLE_S
    world.read(1, "last:1")
    world.read(1, "last:1")
    assert set(world.hixl.writers) == {"last:1"}


def test_reads_that_wait_fail_when_the_worker_leaves(world: World) -> None:
    world.hixl.goes_on.clear()
    failures: list[str] = []

    def read() -> None:
        try:
            world.read(1)
        except ReadError as e:
            failures.append(str(e))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(world.files._read._taken) == 3, "the reads do not begin")
    wait_until(lambda: "connect b:1" in world.hixl.log, "HIXL is not called")
    world.files.close(0.0)
    assert not world.memory.is_freed, "the thread still reads"
    world.hixl.goes_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == ["the worker leaves its group"] * 2, "the first read has ended"


def test_memory_in_use_is_not_freed(world: World) -> None:
    with world.files.read(LentFile("b:1", 1, 8)):
        world.close()
    assert not world.memory.is_freed


def test_memory_that_a_server_lends_is_not_freed(world: World) -> None:
    world.files.close(WAIT_S, is_lent=True)
    assert not world.memory.is_freed


@pytest.mark.parametrize(
    ("error", "wanted"),
    [(ConfigError("no package"), ConfigError), (RuntimeError("odd"), DeviceError)],
)
def test_an_engine_that_cannot_begin_is_an_error(error: Exception, wanted: Any) -> None:
    def refuse() -> Any:
        raise error

    with pytest.raises(wanted, match=str(error)):
        HixlMemory(FakeMemory(), refuse, LOOPBACK, None, WAIT_S)  # type: ignore[arg-type]


def test_a_cann_without_hixl_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from dist_aclgraph.device.hixl import import_hixl  # imports torch

    monkeypatch.setitem(sys.modules, "hixl", None)
    with pytest.raises(ConfigError, match=r"^kv.transport is hixl, .*set kv.transport to sockets$"):
        import_hixl()


def test_the_port_is_one_of_the_configured_ports() -> None:
    port, memory = free_port(), FakeMemory()
    hixl = FakeHixl(memory)

    def begin(host: str = LOOPBACK, timeout_s: float = WAIT_S) -> HixlMemory:
        ports = range(port, port + 1)
        return HixlMemory(memory, lambda: hixl, host, ports, timeout_s)  # type: ignore[arg-type]

    made = begin()
    assert made.engine == f"{LOOPBACK}:{port}"
    made.close(WAIT_S)
    with socket.create_server((LOOPBACK, port)), pytest.raises(PlacementError, match=str(port)):
        begin()
    with pytest.raises(PlacementError, match="no address"):
        begin("192.0.2.1")
    for wildcard in ("0.0.0.0", "::"):
        with pytest.raises(PlacementError, match="all addresses"):
            begin(wildcard)
    assert hixl.log == ["listen", "close"]
    hixl.goes_on.clear()
    with pytest.raises(WorkerError, match="has not begun"):
        begin(timeout_s=0.05)
    hixl.goes_on.set()


def test_a_port_that_another_program_takes_in_between_is_left_to_it() -> None:
    """All workers of a node choose their ports from the same range, and often at the same time."""
    ports, memory, taken = free_ports(2), FakeMemory(), []

    class Overtaken(FakeHixl):
        def listen(self, name: str, memory: Any) -> None:
            super().listen(name, memory)
            if name == f"{LOOPBACK}:{ports[0]}":
                taken.append(socket.create_server((LOOPBACK, ports[0])))
                raise DeviceError("FAILED (503900)")

    engines: list[FakeHixl] = []

    def open_engine() -> FakeHixl:
        engines.append(Overtaken(memory))
        return engines[-1]

    made = HixlMemory(memory, open_engine, LOOPBACK, ports, WAIT_S)  # type: ignore[arg-type]
    try:
        assert made.engine == f"{LOOPBACK}:{ports[1]}"
        assert [each.log for each in engines] == [["listen", "close"], ["listen"]]
    finally:
        made.close(WAIT_S)
        taken[0].close()
    assert memory.is_freed


def test_an_engine_that_cannot_listen_at_a_free_port_is_an_error() -> None:
    memory = FakeMemory()
    hixl = FakeHixl(memory)
    hixl.fails = {"listen"}
    with pytest.raises(DeviceError, match="listen fails"):
        HixlMemory(memory, lambda: hixl, LOOPBACK, free_ports(2), WAIT_S)  # type: ignore[arg-type]
    assert hixl.log == ["listen", "close"]


FAILURES = st.sets(st.sampled_from(["connect", "read", "disconnect"]))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, PART), FAILURES), max_size=20))
@hypothesis_settings(deadline=None, max_examples=50)
def test_no_transfer_writes_where_a_late_transfer_may_write(
    reads: list[tuple[str, int, set[str]]],
) -> None:
    """``FakeHixl`` checks that no two transfers use the same memory. For each read, ``reads``
    contains the engine, the number of bytes, and the calls that fail.
    """
    world = World()
    try:
        for index, (engine, num_bytes, fails) in enumerate(reads):
            world.hixl.fails = fails
            with contextlib.suppress(ReadError):
                assert world.read(index, engine, num_bytes) == bytes([index]) * num_bytes
            assert not world.hixl.problems
        assert world.files.num_lost == len(world.hixl.lost)
        used = sorted(world.files._read._taken)
        assert used == sorted(world.hixl.lost), "exactly the lost slots are not given back"
    finally:
        world.hixl.fails = set()
        world.close()


def test_a_server_that_cannot_begin_ends_hixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    kv = {"host_path": str(tmp_path), "host_gib": 0.01}
    config = make_config({"model": str(MODEL), "kv": kv})
    settings = NodeFilesSettings(
        "node", LOOPBACK, TOKEN, (CachePlace(),), 0, finds=True, fetches=True, serves=True,
        uses_hixl=True,
    )  # fmt: skip
    monkeypatch.setattr(Listener, "bind", Mock(side_effect=PlacementError("no port is free")))
    with pytest.raises(PlacementError):
        NodeFiles(config, settings, lambda *_: world.files)
    assert world.hixl.log == ["listen", "close"] and world.memory.is_freed
