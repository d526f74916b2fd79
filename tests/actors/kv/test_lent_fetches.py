"""The source copies files to its own memory. The fetching worker reads the files from this memory.
Both ends are in one process here, so a copy of the bytes replaces HIXL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.lent_files import Lender, LentFile, LentFiles, ReadError
from dist_aclgraph.kv.arena import ALIGNMENT, Arena
from tests.actors.fetched_files import HYBRID, NAMES, PLACE, WAIT_S, World
from tests.actors.leftovers import wait_until

ADDRESS, ENGINE = 1 << 40, "source:1"
NUM_SLOTS, SLOT_BYTES = 3, 2 * ALIGNMENT  # each file is slightly larger than one page


class Copier:
    """Reads the memory of the source.

    Attributes:
        damage: function that changes the bytes of a file between source and reader.
        num_reads: number of reads, including reads that failed.
        fails_at: number of the first read that fails. All later reads fail, too.
    """

    engine = "reader:1"

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self._guard = threading.Lock()
        self.damage: Callable[[bytearray], bytearray] = bytearray
        self.num_reads, self.fails_at = 0, 1 << 30

    @contextmanager
    def read(self, lent: LentFile) -> Iterator[memoryview]:
        with self._guard:
            number, self.num_reads = self.num_reads, self.num_reads + 1
        if number >= self.fails_at:
            raise ReadError("the link is broken")
        assert lent.engine == ENGINE
        start = lent.address - ADDRESS
        found = self.damage(self._memory[start : start + lent.num_bytes])
        try:
            yield memoryview(found)
        finally:
            found[:] = bytes(len(found))  # the memory gets another file


class Lending(World):
    def __init__(self, folder: Path, place=PLACE) -> None:
        memory = bytearray(NUM_SLOTS * SLOT_BYTES)
        self.arena = Arena(0, len(memory))
        self.copier = Copier(memory)
        lender = Lender(ENGINE, ADDRESS, memoryview(memory), self.arena)
        super().__init__(folder, place, LentFiles(lender), self.copier)

    def check_slots(self) -> None:
        wait_until(lambda: not self.arena.is_used, "slots have not come back")


@pytest.fixture(params=[PLACE])
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> Iterator[Lending]:
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)
    made = Lending(tmp_path, request.param)
    yield made
    made.close()


def test_all_files_arrive_through_few_slots(world: Lending) -> None:
    """The fetch requests more files than the source has slots in its memory."""
    world.write(*NAMES)
    world.fetch()
    assert world.found() == NAMES
    assert world.copier.num_reads == 2 * len(NAMES)
    assert (world.fetches.counts.blocks, world.fetches.counts.failures) == (len(NAMES), 0)
    world.check_slots()


@pytest.mark.parametrize("world", [HYBRID], indirect=True)
def test_checkpoints_arrive_before_their_blocks(world: Lending) -> None:
    world.write(*NAMES, states=(NAMES[1], NAMES[3]))
    world.fetch()
    assert world.found() == NAMES[:4] and world.found("state") == [NAMES[3]]
    world.check_slots()


def test_a_missing_file_ends_the_fetch(world: Lending) -> None:
    world.write(*NAMES)
    world.there["block"][1].delete(NAMES[2])
    world.fetch()
    assert world.found() == NAMES[:2] and world.fetches.counts.failures == 0
    world.check_slots()


def flipped(file: bytearray) -> bytearray:
    file[-1] ^= 1
    return file


@pytest.mark.parametrize(
    "damage", [flipped, lambda file: bytearray(len(file))], ids=["one bit", "all"]
)
def test_bytes_that_change_on_the_way_are_found_by_the_checksum(
    world: Lending, damage: Callable[[bytearray], bytearray]
) -> None:
    world.write(*NAMES)
    world.copier.damage = damage
    world.fetch()
    assert world.found() == []
    assert not any(world.here["block"][place].has(NAMES[0]) for place in range(2))
    world.check_slots()
    world.copier.damage = bytearray
    world.fetch()
    assert world.found() == NAMES


def test_another_file_in_the_slot_is_found_by_its_name(world: Lending) -> None:
    """A reader that reads after the end of its lease can find another file in its slot."""
    world.write(*NAMES)
    other = world.file(NAMES[5]).read_bytes()
    world.copier.damage = lambda _: bytearray(other)
    world.fetch()
    assert world.found() == []


def test_a_read_that_fails_ends_the_fetch_and_the_source_is_left_alone(world: Lending) -> None:
    world.write(*NAMES)
    world.copier.fails_at = 4
    world.fetch()
    assert world.found() == NAMES[:2] and world.fetches.counts.failures == 1
    world.copier.fails_at = 1 << 30
    world.fetch()
    assert world.found() == NAMES[:2], "the source is not asked"
    world.check_slots()
    world.now_s += block_fetches.PAUSE_S
    world.fetch()
    assert world.found() == NAMES


def test_a_request_that_ends_gives_back_all_slots(world: Lending) -> None:
    world.write(*NAMES)
    looks = iter([True, True, True])
    world.fetch(is_wanted=lambda: next(looks, False))
    assert world.found() == NAMES[:1]
    world.check_slots()


def test_a_lent_file_of_an_impossible_size_is_not_read(
    world: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write(*NAMES)
    monkeypatch.setattr("dist_aclgraph.actors.wire.block_links.MAX_FILE_BYTES", 100)
    world.fetch()
    assert world.copier.num_reads == 0 and world.fetches.counts.failures == 1


@pytest.mark.parametrize("lends", [True, False])
def test_ends_with_different_transports_use_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lends: bool
) -> None:
    """While groups are replaced, old and new groups can have different transports."""
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)
    memory = bytearray(NUM_SLOTS * SLOT_BYTES)
    copier = Copier(memory)
    lender = Lender(ENGINE, ADDRESS, memoryview(memory), Arena(0, len(memory)))
    world = World(tmp_path, lent=LentFiles(lender) if lends else None,
                  reader=None if lends else copier)  # fmt: skip
    try:
        world.write(*NAMES)
        world.fetch()
        assert world.found() == NAMES and copier.num_reads == 0
    finally:
        world.close()
