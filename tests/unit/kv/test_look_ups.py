"""While a disk hangs, no step is delayed, and files in memory are still found."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.kv import look_ups
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.look_ups import (
    GRACE_S,
    LIMIT_S,
    PAUSE_S,
    DiskLookUps,
    Files,
    _Call,
    look_ups_of,
)
from dist_aclgraph.kv.tiers import DISK, HOST, KVTiers

NEAR, FAR = b"n" * 16, b"f" * 16
WAIT_S = 180.0


class World:
    """Look-ups of two blocks: one in memory, and one on a disk that can hang."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.works = threading.Event()
        self.works.set()
        memory = Files(NEAR.__eq__, num_bytes=lambda: {HOST: 1})
        everywhere = Files(self.is_found, num_bytes=self.count)
        self.look_ups = DiskLookUps(memory, everywhere, clock=lambda: self.now_s)

    def is_found(self, block_hash: bytes) -> bool:
        assert self.works.wait(WAIT_S)
        return block_hash in (NEAR, FAR)

    def count(self) -> dict[str, int]:
        assert self.works.wait(WAIT_S)
        return {HOST: 1, DISK: 2}

    def ask(self, block_hash: bytes) -> Callable[[], bool | None]:
        return self.look_ups.ask(lambda files: files.has(block_hash))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.works.set()


def settled(answer: Callable[[], bool | None]) -> bool:
    """Call ``answer`` until the disk has answered; return the result."""
    for _ in range(int(WAIT_S / 0.01)):
        if (found := answer()) is not None:
            return found
        threading.Event().wait(0.01)
    raise AssertionError("no answer")


def test_a_disk_that_answers_is_looked_up(world: World) -> None:
    assert settled(world.ask(FAR)) and settled(world.ask(NEAR))
    assert not settled(world.ask(b"?" * 16))
    assert world.look_ups.num_late == 0


def test_a_disk_that_hangs_is_left_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.works.clear()
    with caplog.at_level(logging.WARNING):
        first, second = world.ask(FAR), world.ask(NEAR)
        assert first() is None and second() is None, "the caller need not wait"
        world.now_s += LIMIT_S
        assert (first(), second()) == (False, True)
        assert (world.ask(FAR)(), world.ask(NEAR)()) == (False, True), "known at once"
        world.now_s += PAUSE_S
        assert world.ask(FAR)() is False, "the first look-up has not returned"
    assert world.look_ups.num_late == 2
    assert sum("kv_disk_silent" in record.message for record in caplog.records) == 1


def test_a_disk_that_answers_again_is_used_after_a_pause(world: World) -> None:
    world.works.clear()
    late = world.ask(FAR)
    world.now_s += LIMIT_S
    assert late() is False
    world.works.set()
    assert world.ask(FAR)() is False
    world.now_s += PAUSE_S
    # The look-up thread may not have noticed yet that the disk answers again.
    assert settled(lambda: settled(world.ask(FAR)) or None)
    assert world.look_ups.num_late == 1


def test_a_look_up_that_fails_finds_the_files_in_memory(world: World) -> None:
    def fail(files: Files) -> bool:
        if files.num_bytes() != {HOST: 1}:
            raise RuntimeError("the disk is broken")
        return True

    assert settled(world.look_ups.ask(fail))
    assert settled(world.ask(FAR)), "the thread goes on"


def test_the_last_known_bytes_are_reported_while_the_disk_hangs(world: World) -> None:
    assert settled(lambda: world.look_ups.num_bytes() == {HOST: 1, DISK: 2} or None)
    world.works.clear()
    for _ in range(3):
        assert world.look_ups.num_bytes() == {HOST: 1, DISK: 2}
    world.now_s += LIMIT_S
    world.look_ups.num_bytes()
    assert world.look_ups.num_late == 1


def test_many_questions_delay_the_caller_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(
        look_ups, "_Call", lambda run, deadline_s: _Call(run, deadline_s, Counted())
    )
    world.works.clear()
    answers = [world.ask(FAR) for _ in range(5)]
    assert waits == [GRACE_S]
    world.works.set()
    assert all(map(settled, answers)) and settled(world.ask(FAR)) and len(waits) == 2


def test_another_thread_may_end_the_pause(world: World) -> None:
    class Raced(DiskLookUps):
        """Simulates two threads. A thread for metrics sees the pause. Then the loop's thread ends
        the pause.
        """

        @property
        def _late(self) -> Any:
            return self.__dict__.pop("late", None)

        @_late.setter
        def _late(self, late: Any) -> None:
            self.__dict__["late"] = late

    world.look_ups = Raced(Files(NEAR.__eq__), Files(world.is_found), lambda: world.now_s)
    world.works.clear()
    first = world.ask(FAR)
    world.now_s += LIMIT_S
    assert first() is False
    assert world.ask(NEAR)() is True, "the disk has not answered"


@pytest.mark.parametrize("names", [(HOST,), (HOST, DISK), (DISK,)])
def test_only_a_disk_needs_a_thread(tmp_path: Path, names: tuple[str, ...]) -> None:
    files = {name: BlockFiles(tmp_path, tmp_path / name, 1 << 20) for name in names}
    tiers = KVTiers(files)
    files[names[-1]].write(NEAR, [memoryview(b"x")])
    look_ups = look_ups_of(tiers, None)
    assert isinstance(look_ups, DiskLookUps) == (DISK in names)
    assert settled(look_ups.ask(lambda files: files.has(NEAR)))
    assert tiers.has(NEAR, only=HOST) == (names == (HOST,))
