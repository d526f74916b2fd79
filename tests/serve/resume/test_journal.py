"""The journal of a connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.serve.openai.body import BodyBudget
from dist_aclgraph.serve.resume.journal import (
    JOURNAL,
    Chance,
    Entry,
    Journal,
    Opening,
    read_records,
    write_opening,
)
from dist_aclgraph.serve.resume.memory import RECORD_BYTES, JournalMemory
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs

NUM_READ, NUM_SENT = 100, 17
OPENING = Opening(20, Chance("abc", 1700000000, 5))
LARGE = RequestDelta("a", bytes(RECORD_BYTES))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
REPORTS = st.builds(
    lambda ids: RowLogprobs(pack_ints(ids), tuple(-0.5 * i for i in ids), 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
DELTAS = st.builds(
    RequestDelta,
    st.just("a"),
    TOKENS.map(pack_ints),
    st.sampled_from([None, "stop", "length", "error"]),
    st.lists(st.none() | REPORTS, max_size=2).map(tuple),
    st.integers(0, 99),
    st.text(max_size=5),
    st.sampled_from(["", "EngineDeadError"]),
)


@contextmanager
def new_memory() -> Iterator[tuple[JournalMemory, int]]:
    memory, descriptor = JournalMemory.create()
    memory.begin(NUM_READ, NUM_SENT)
    yield memory, descriptor
    memory.close()
    os.close(descriptor)


def state_of(descriptor: int) -> Any:
    """Return the journal's state as another process reads it; None if the journal is void."""
    try:
        memory = JournalMemory(descriptor)
    except ValueError:
        return None
    found = memory.num_read, memory.num_sent, memory.records()
    memory.close()
    return found


class DyingWords:
    """The words in the memory of a journal. After ``num_stores`` stores, the process that writes
    them dies.
    """

    def __init__(self, words: Any, num_stores: int) -> None:
        self._words, self._num_stores = words, num_stores

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if not self._num_stores:
            raise KeyboardInterrupt
        self._num_stores -= 1
        self._words[at] = value

    def release(self) -> None:
        self._words.release()


TURNS = st.sampled_from(["append", "append large", "clear", "void"])


@given(st.lists(TURNS, max_size=12), TURNS, st.integers(0, 6))
def test_wherever_its_writer_is_killed_a_journal_says_what_was_before_or_what_is_then(
    turns: list[str], last: str, num_stores: int
) -> None:
    def take(turn: str, memory: JournalMemory, i: int) -> None:
        if turn == "append":
            memory.append(b"record %d" % i)
        elif turn == "append large":
            memory.append(bytes(5000))
        elif turn == "clear":
            memory.clear(NUM_READ + i + 1, NUM_SENT + i + 1)
        else:
            memory.void()

    with new_memory() as (memory, descriptor), new_memory() as (twin, twin_descriptor):
        for i, turn in enumerate(turns):
            take(turn, memory, i)
            take(turn, twin, i)
        before = state_of(descriptor)
        take(last, twin, len(turns))

        memory._words = DyingWords(memory._words, num_stores)  # type: ignore[assignment]
        with suppress(KeyboardInterrupt):
            take(last, memory, len(turns))

        assert state_of(descriptor) in (before, state_of(twin_descriptor))
        if state_of(descriptor) is not None:
            again = JournalMemory(descriptor)
            assert again.append(b"more")
            assert state_of(descriptor)[2][-1] == b"more"
            again.close()


@given(st.lists(st.tuples(st.integers(0, 5), DELTAS), max_size=8))
def test_a_journal_says_which_deltas_came(deltas: list[tuple[int, RequestDelta]]) -> None:
    with new_memory() as (memory, descriptor):
        assert write_opening(memory, OPENING)
        journal = Journal(OPENING.chance, memory=memory)
        for index, delta in deltas:
            journal.note(index, delta)

        read = JournalMemory(descriptor)
        opening, entries = read_records(read)
        read.close()
    assert opening == OPENING
    assert [(entry.index, entry.delta("a")) for entry in entries] == deltas
    assert entries == tuple(Entry.of_delta(index, delta) for index, delta in deltas)


@given(st.lists(st.sampled_from(["append", "void", "clear", "large"]), max_size=12))
def test_a_void_journal_has_no_records_until_it_is_cleared(
    turns: list[str],
) -> None:
    with new_memory() as (memory, descriptor):
        is_void, num_records = False, 0
        for turn in turns:
            if turn == "clear":
                memory.clear(NUM_READ + 1, NUM_SENT + 1)
                is_void, num_records = False, 0
            elif turn == "append":
                assert memory.append(b"record") == (not is_void)
                num_records += not is_void
            elif turn == "void":
                memory.void()
                is_void = True
            else:
                assert not memory.append(bytes(RECORD_BYTES))
                is_void = True
            assert memory.is_void == is_void
            found = state_of(descriptor)
            assert (found is None) == is_void
            assert found is None or len(found[2]) == num_records


@pytest.mark.parametrize("ending", ["clear", "void"])
def test_a_large_journal_gives_its_memory_back(ending: str) -> None:
    with new_memory() as (memory, descriptor):
        memory.append(bytes(1 << 20))
        assert os.fstat(descriptor).st_blocks * 512 > 1 << 20

        memory.void() if ending == "void" else memory.clear(NUM_READ, NUM_SENT)

        assert os.fstat(descriptor).st_blocks * 512 < 32 << 10


def test_deaths_with_one_request_are_not_counted_for_those_behind_it() -> None:
    with new_memory() as (memory, _):
        for i in range(4):
            assert [memory.count_loss() for _ in range(2)] == [1, 2]
            memory.clear(NUM_READ + i + 1, NUM_SENT + i + 1)


def test_memory_without_a_journal_is_refused() -> None:
    descriptor = os.memfd_create("empty")
    with pytest.raises(ValueError, match="mmap length"):
        JournalMemory(descriptor)
    os.close(descriptor)


def test_an_answer_larger_than_its_journal_is_no_longer_kept() -> None:
    ended: list[None] = []
    with new_memory() as (memory, descriptor):
        journal = Journal(OPENING.chance, memory=memory, on_end=lambda: ended.append(None))

        journal.note(0, LARGE)
        journal.note(0, RequestDelta("a", bytes(4)))
        journal.end()

        assert ended == [None]
        assert state_of(descriptor) is None


class Budget:
    """A budget of ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.room:
            return False
        self.room -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.room += num_bytes


def test_a_journal_ends_when_the_memory_of_all_journals_is_used() -> None:
    with new_memory() as (memory, _):
        write_opening(memory, OPENING)
        budget, ended = Budget(1000), []
        journal = Journal(OPENING.chance, memory=memory, on_end=lambda: ended.append(True))
        journal.count_in(budget)
        assert budget.room == 1000 - memory.num_record_bytes

        journal.note(0, RequestDelta("a", bytes(100)))
        assert budget.room < 900 and not ended
        journal.note(0, RequestDelta("a", bytes(1000)))

        assert ended == [True]
        assert budget.room == 1000
        assert len(memory.records()) == 2


def test_the_journal_of_a_request_counts_as_its_body_does(service: Any) -> None:
    with new_memory() as (memory, _):
        journal = Journal(OPENING.chance, memory=memory)
        scope = {"extensions": {JOURNAL: lambda chance: journal}}
        before = service.state.bodies.num_bytes

        assert service.state.open_journal(scope) is journal
        journal.note(0, RequestDelta("a", bytes(100)))
        assert service.state.bodies.num_bytes >= before + 100
        journal.end()

        assert service.state.bodies.num_bytes == before


def test_journals_take_half_of_the_budget_and_bodies_all_of_it() -> None:
    budget = BodyBudget(100)

    assert budget.take(50) and not budget.take(1)
    budget.num_bytes += 50
    budget.check_room()
    budget.give_back(51)
    assert budget.take(1)
