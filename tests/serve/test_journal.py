"""Tests of the journal of a connection, and of the second process that holds the connection."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.serve.http.server import listen
from dist_aclgraph.serve.openai.body import BodyBudget
from dist_aclgraph.serve.resume.counters import read_counters
from dist_aclgraph.serve.resume.holder import ConnectionHolder, HeldConnection, HolderLink
from dist_aclgraph.serve.resume.journal import (
    JOURNAL,
    Chance,
    Entry,
    Journal,
    Opening,
    read_records,
    write_opening,
)
from dist_aclgraph.serve.resume.memory import RECORD_BYTES, REQUEST_BYTES, JournalMemory
from dist_aclgraph.serve.resume.record import CONTINUE, MAX_LOSSES, ConnectionRecord
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
    memory, descriptor = JournalMemory.create(NUM_READ, NUM_SENT)
    yield memory, descriptor
    memory.close()
    os.close(descriptor)


def state_of(descriptor: int) -> Any:
    """Return the journal as another process sees it; None if the journal is void."""
    try:
        memory = JournalMemory(descriptor)
    except ValueError:
        return None
    found = memory.num_read, memory.num_sent, memory.records()
    memory.close()
    return found


class DyingWords:
    """The memory words of a journal; the writing process dies after ``num_stores`` stores."""

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


# -- records of connections ------------------------------------------------------------------------


class Connection:
    """A connection, the record of the process that answers, and the holder of the connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.holder = ConnectionHolder()
        self._end = self.holder.open()
        self.record = ConnectionRecord(HolderLink(self._end))
        self.record.hold(self.server.fileno())
        self.holder.take_in()

    def read(self, data: bytes, *, is_noted: bool = True) -> None:
        """Let the process read bytes of the client; if ``is_noted``, it also notes their number."""
        self.client.sendall(data)
        self.server.recv_into(self.record.read_buffer(), len(data), socket.MSG_WAITALL)
        if is_noted:
            assert self.record.take_read(len(data)) == data

    def send(self, data: bytes) -> None:
        self.server.sendall(self.record.take_unsent(data))

    def die(self) -> ConnectionRecord:
        """Let the process die; return the record that the next process takes over."""
        self._end.close()
        self._end = self.holder.open()
        link = self.holder.become_link(self._end)
        [(number, held)] = link.left.items()
        self.record = ConnectionRecord.take_over(link, number, held)
        self.holder._held[number] = held  # in a service, the holder is another process
        return self.record

    def close(self) -> None:
        self.holder.close()
        self._end.close()
        self.client.close()
        self.server.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    found = Connection()
    yield found
    found.close()


@given(
    parts=st.lists(st.binary(min_size=1, max_size=99), min_size=1, max_size=4),
    is_noted=st.booleans(),
    num_losses=st.integers(1, MAX_LOSSES - 1),
)
def test_all_that_was_read_is_known(parts: list[bytes], is_noted: bool, num_losses: int) -> None:
    """The next process gets all bytes, even if the last part was not noted before the death."""
    connection, others = Connection(), Connection()
    for i, part in enumerate(parts):
        connection.read(part, is_noted=is_noted or i < len(parts) - 1)
        others.read(b"of another client")

    for _ in range(num_losses):
        record = connection.die()
        assert record.all_read() == b"".join(parts)
        assert not record.is_owed

    connection.close()
    others.close()


def test_bytes_after_an_answered_request_belong_to_the_next_request(connection: Connection) -> None:
    for i in range(5):
        connection.read(b"request %d" % i)
        connection.send(b"answer")
        connection.record.spend()
        connection.record.clear()

    connection.read(b"the last", is_noted=False)

    assert connection.die().all_read() == b"the last"


def test_a_connection_that_its_client_has_ended_does_not_go_on(connection: Connection) -> None:
    connection.read(b"GET")
    connection.client.shutdown(socket.SHUT_WR)

    with pytest.raises(ValueError, match="the client has left"):
        connection.die()


def test_a_response_that_nobody_can_make_again_does_not_go_on(connection: Connection) -> None:
    connection.read(b"GET")
    connection.send(b"HTTP/1.1 200 OK")

    with pytest.raises(ValueError, match="cannot be made again"):
        connection.die()


def test_bytes_that_were_written_and_never_sent_do_not_go_on(connection: Connection) -> None:
    connection.read(b"POST")
    connection.record.take_unsent(CONTINUE)
    connection.record.open_journal(OPENING.chance, is_alone=True)

    with pytest.raises(ValueError, match="were lost"):
        connection.die()


def test_a_client_that_was_told_to_send_its_body_is_not_told_again(connection: Connection) -> None:
    connection.read(b"POST")
    connection.send(CONTINUE)

    resumed = connection.die().take_resumed()

    assert resumed is not None
    assert (resumed.journal, resumed.may_send_body) == (None, True)


def test_a_request_at_which_processes_die_in_a_row_is_given_up(connection: Connection) -> None:
    for _ in range(MAX_LOSSES + 1):
        connection.die()  # this death does not count, because no request is in progress
    connection.read(b"POST")

    for _ in range(MAX_LOSSES - 1):
        connection.die()

    with pytest.raises(ValueError, match="processes died"):
        connection.die()


def test_processes_between_whose_deaths_an_answer_grew_do_not_count(connection: Connection) -> None:
    connection.read(b"POST")
    journal = connection.record.open_journal(OPENING.chance, is_alone=True)

    for token in range(3 * MAX_LOSSES):
        journal.note(0, RequestDelta("a", pack_ints([token])))
        resumed = connection.die().take_resumed()
        assert resumed is not None and resumed.journal is not None
        journal = resumed.journal

    for _ in range(MAX_LOSSES - 2):
        connection.die()
    with pytest.raises(ValueError, match="processes died"):
        connection.die()


def test_a_request_without_room_is_read_and_its_connection_is_not_held(
    connection: Connection,
) -> None:
    part = bytes(1 << 15)
    for _ in range(REQUEST_BYTES // len(part)):
        connection.read(part)
    assert connection.record.is_held

    connection.read(part)
    assert not connection.record.is_held

    connection.record.clear()
    assert connection.record.is_held


def test_of_two_requests_at_once_neither_has_a_journal(connection: Connection) -> None:
    connection.read(b"POST")
    journal = connection.record.open_journal(OPENING.chance, is_alone=False)

    journal.note(0, RequestDelta("a"))

    assert not connection.die().is_owed


def test_a_journal_that_ends_before_its_answer_is_void(connection: Connection) -> None:
    connection.read(b"POST")
    connection.record.open_journal(OPENING.chance, is_alone=True).end()

    assert not connection.record.is_held


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 80))
def test_bytes_that_were_sent_before_are_not_sent_again(parts: list[bytes], num: int) -> None:
    record = ConnectionRecord(None)
    record.num_omitted = num

    out = b"".join([record.take_unsent(part) for part in parts])

    assert out == b"".join(parts)[num:]
    assert record.num_omitted == max(0, num - len(b"".join(parts)))


# -- counters --------------------------------------------------------------------------------------


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_a_connection_has_taken(
    writes: list[tuple[int, bool]],
) -> None:
    with connected() as (client, server):
        server.setblocking(False)
        begun, taken = read_counters(server.fileno()).num_sent, 0
        for count, reads in writes:
            try:
                taken += server.send(bytes(count))
            except BlockingIOError:
                reads = True
            if reads:
                client.recv(30_000)
            assert read_counters(server.fileno()).num_sent - begun == taken


@given(st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_of_a_connection_have_been_read(
    sent: list[tuple[int, bool]],
) -> None:
    with connected() as (client, server):
        begun, num_read = read_counters(server.fileno()).num_read, 0
        for count, reads in sent:
            client.sendall(bytes(count))
            if reads:
                num_read += len(server.recv(4_000))
            assert read_counters(server.fileno()).num_read - begun == num_read


def test_urgent_data_is_data_like_all_other() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        server.settimeout(10)
        client.sendall(b"abcde")
        client.send(b"fgh", socket.MSG_OOB)
        client.sendall(b"ijkl")
        data = b""
        while len(data) < 12:
            data += server.recv(2)
            assert read_counters(server.fileno()).num_read == len(data)
    assert data == b"abcdefghijkl"


# -- the holder ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def ignoring() -> Iterator[None]:
    """Ignore the signal that tells a holder about new messages."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(
    st.lists(st.sampled_from(["begin", "void", "end", "lose", "take in"]), max_size=30),
    st.data(),
)
def test_a_holder_has_all_connections_that_have_begun_and_not_ended(
    turns: list[str], data: st.DataObject
) -> None:
    """If the journal of a connection is void when its process ends, the connection is closed."""
    before = descriptors()
    holder = ConnectionHolder()
    end = holder.open()
    link = HolderLink(end)
    journals: dict[int, tuple[JournalMemory, int]] = {}
    for turn in turns:
        number = data.draw(st.sampled_from(sorted(journals))) if journals else 0
        if turn == "begin":
            memory, descriptor = JournalMemory.create(0, 0)
            begun = link.begin(descriptor, descriptor)
            assert begun is not None
            journals[begun] = memory, descriptor
        elif turn == "void" and journals:
            journals[number][0].void()
        elif turn == "end" and journals:
            link.end(number)
            close(*journals.pop(number))
        elif turn == "take in":
            holder.take_in()
        elif turn == "lose":
            end.close()
            for n in [n for n, (memory, _) in journals.items() if memory.is_void]:
                close(*journals.pop(n))
            end = holder.open()
            link = HolderLink(end, dict.fromkeys(journals, HeldConnection(0, 0)))
    holder.take_in()

    assert len(holder) == len(journals)
    end.close()
    holder.close()
    for journal in journals.values():
        close(*journal)
    # The comparison is <=, because objects of earlier tests can be closed meanwhile.
    assert descriptors() <= before


def close(memory: JournalMemory, descriptor: int) -> None:
    memory.close()
    os.close(descriptor)


def test_a_link_that_is_full_holds_nothing_and_says_later_what_has_ended() -> None:
    holder, read, write = ConnectionHolder(), *os.pipe()
    link = HolderLink(holder.open())
    numbers = []
    while (number := link.begin(read, write)) is not None:
        numbers.append(number)
        assert len(numbers) < 100_000

    for number in numbers:
        link.end(number)
    assert len(holder) == 0
    holder.take_in()
    assert len(holder) == len(numbers)
    link.flush()
    holder.take_in()

    assert len(holder) == 0
    holder.close()
    os.close(read)
    os.close(write)


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
