"""A server puts files into slots of its memory, so that readers can read them there. A slot gets
another file only after its reader has ended its reads, or after the reader's lease has expired.
"""

from __future__ import annotations

import os
from io import FileIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.wire.lent_files import (
    LEASE_S,
    MAX_WAITING,
    Lender,
    LentAnswer,
    LentFile,
    LentFiles,
)
from dist_aclgraph.kv.arena import ALIGNMENT, Arena
from dist_aclgraph.planning.budget import MAX_LINKS

ADDRESS, ENGINE = 1 << 40, "host:1"


def opened(file: bytes) -> FileIO:
    made = FileIO(os.memfd_create("file"), "r+")
    made.write(file)
    made.seek(0)
    return made


class World:
    """Lends slots for three files of one page."""

    def __init__(self, pages: int = 3) -> None:
        self.now_s = 0.0
        self.memory = bytearray(pages * ALIGNMENT)
        lender = Lender(ENGINE, ADDRESS, memoryview(self.memory), Arena(0, len(self.memory)))
        self.files = LentFiles(lender, lambda: self.now_s)
        self.num_opened = 0

    def ask(self, number: int, file: bytes, peer: bytes = b"p", reader: str = "r:1") -> None:
        """Request a file whose contents are ``file``; if ``file`` is empty, the server does not
        have the file.
        """

        def open_file() -> FileIO | None:
            self.num_opened += 1
            return opened(file) if file else None

        self.files.ask(peer, number, reader, open_file)

    def answers(self) -> list[LentAnswer]:
        return list(self.files.answers())

    def at(self, lent: LentFile | None) -> bytes:
        assert lent is not None and lent.engine == ENGINE
        start = lent.address - ADDRESS
        return bytes(self.memory[start : start + lent.num_bytes])


@pytest.fixture
def world() -> World:
    return World()


def test_files_are_in_memory_where_the_answers_say(world: World) -> None:
    for number, file in enumerate((b"one", b"", b"three")):
        world.ask(number, file)
    first, missing, third = world.answers()
    assert (world.at(first.lent), world.at(third.lent)) == (b"one", b"three")
    assert missing == (b"p", 1, None)


def test_requests_wait_for_room_in_their_order(world: World) -> None:
    for number in range(6):
        world.ask(number, bytes([number]) * ALIGNMENT)
    assert [each.number for each in world.answers()] == [0, 1, 2]
    assert world.files.has_waiting and world.num_opened == 4, "only one waiting file is open"
    world.files.end(b"other", 5)
    assert world.answers() == []
    world.files.end(b"p", 1)
    found = world.answers()
    assert [(each.number, world.at(each.lent)[0]) for each in found] == [(3, 3), (4, 4)]
    world.files.end(b"p", 5)  # the reader is gone
    assert not world.files.has_waiting
    world.ask(0, b"x" * 3 * ALIGNMENT, peer=b"q")
    assert world.at(world.answers()[0].lent) == b"x" * 3 * ALIGNMENT, "all slots have come back"


def test_a_file_that_cannot_be_read_whole_is_missing(world: World) -> None:
    cut = opened(b"whole")
    world.files.ask(b"p", 0, "r:1", lambda: cut)
    cut.seek(1)
    world.files.ask(b"p", 1, "r:1", None)
    assert [each.lent for each in world.answers()] == [None, None]
    world.ask(2, b"x" * 3 * ALIGNMENT)
    assert world.answers()[0].lent is not None, "the slot has come back"


def test_a_number_that_is_used_twice_loses_no_slot(world: World) -> None:
    for _ in range(5):
        world.ask(0, b"x" * ALIGNMENT)
    assert [each.lent is not None for each in world.answers()] == [True] + 4 * [False]
    world.files.end(b"p", 0)
    world.ask(1, b"x" * 3 * ALIGNMENT)
    assert world.answers()[0].lent is not None


def test_a_dead_reader_keeps_its_slots_for_a_while(world: World) -> None:
    world.ask(0, b"x" * 3 * ALIGNMENT)
    assert len(world.answers()) == 1
    world.ask(0, b"y", peer=b"q")
    world.now_s = LEASE_S
    assert world.answers() == []
    world.now_s += 1
    assert [each.peer for each in world.answers()] == [b"q"]
    world.files.end(b"p", 0)  # the reader is alive, but answers late


def test_as_many_readers_are_accepted_as_streams_are_reserved() -> None:
    world = World(pages=2 * MAX_LINKS + 2)
    for number, index in enumerate((*range(MAX_LINKS + 1), 0)):
        world.ask(number, b"x", peer=bytes([index]), reader=f"r:{index}")
    found = [each.lent is not None for each in world.answers()]
    assert found == [True] * MAX_LINKS + [False, True]
    world.now_s += LEASE_S + 1
    world.ask(2, b"x", peer=b"new", reader="new:1")
    assert world.answers()[-1].lent is not None, "silent readers have lost their places"


def test_the_number_of_waiting_requests_is_limited(world: World) -> None:
    world.ask(0, b"x" * 3 * ALIGNMENT)
    assert len(world.answers()) == 1
    for number in range(1, MAX_WAITING + 2):
        world.ask(number, b"x")
    world.files.end(b"p", 0)
    assert sum(each.lent is not None for each in world.answers()) == 3
    world.files.end(b"p", MAX_WAITING)
    assert not world.answers(), "one more request has no answer"
    world.ask(MAX_WAITING + 2, b"x")
    [last] = world.answers()
    assert last.lent is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2 * ALIGNMENT)), max_size=40))
def test_a_lent_file_does_not_change_before_its_reader_ends(
    actions: list[tuple[str, int]],
) -> None:
    """Each action has a reader and a size. If the size is above 0, the reader requests a file of
    this size. If the size is 0, the reader ends its reads.
    """
    world, numbers = World(), dict.fromkeys("abc", 0)
    lent: dict[tuple[str, int], tuple[LentFile, int]] = {}
    for index, (peer, size) in enumerate(actions):
        number = numbers[peer] = numbers[peer] + 1
        if size:
            world.ask(number, bytes([index]) * size, peer.encode(), peer)
        else:
            world.files.end(peer.encode(), number)
            lent = {key: each for key, each in lent.items() if key[0] != peer}
        for answer in world.answers():
            assert answer.lent is not None
            key = answer.peer.decode(), answer.number
            lent[key] = answer.lent, world.at(answer.lent)[0]
        for each, value in lent.values():
            assert world.at(each) == bytes([value]) * each.num_bytes
