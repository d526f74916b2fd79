"""The records of connections, and the process that holds the connections."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer, listen
from dist_aclgraph.serve.resume.counters import read_counters
from dist_aclgraph.serve.resume.holder import ConnectionHolder, HeldConnection, HolderLink
from dist_aclgraph.serve.resume.journal import Chance
from dist_aclgraph.serve.resume.memory import REQUEST_BYTES, JournalMemory
from dist_aclgraph.serve.resume.record import CONTINUE, MAX_LOSSES, ConnectionRecord
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import until

CHANCE = Chance("abc", 1700000000, 5)


@pytest.fixture(scope="module", autouse=True)
def ignoring() -> Iterator[None]:
    """Ignore the signal by which a holder of connections learns of new messages."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


class Connection:
    """A connection, its record in the process that answers, and the process that holds the
    connection.
    """

    def __init__(self, dies: type[BaseException] | None = None) -> None:
        """Make a connection and its holder.

        Args:
            dies: the error with which the process dies while it holds the connection.
        """
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.holder = ConnectionHolder()
        self._end = self.holder.open()
        self.record = ConnectionRecord(HolderLink(self._end))
        with pytest.raises(dies) if dies else nullcontext():
            self.record.hold(self.server.fileno())
        self.holder.take_in()

    def read(self, data: bytes, *, is_noted: bool = True) -> None:
        """Let the process read the client's bytes ``data``. If ``is_noted``, the process also adds
        the number of these bytes to the record.
        """
        self.client.sendall(data)
        self.server.recv_into(self.record.read_buffer(), len(data), socket.MSG_WAITALL)
        if is_noted:
            assert self.record.take_read(len(data)) == data

    def send(self, data: bytes) -> None:
        self.server.sendall(self.record.take_unsent(data))

    def die(self) -> ConnectionRecord:
        """Let the process die; return the connection's record in the next process."""
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
    """The next process gets all bytes, even if a process died before it recorded the last part."""
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
    connection.record.open_journal(CHANCE, is_alone=True)

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
    journal = connection.record.open_journal(CHANCE, is_alone=True)

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
    journal = connection.record.open_journal(CHANCE, is_alone=False)

    journal.note(0, RequestDelta("a"))

    assert not connection.die().is_owed


def test_a_journal_that_ends_before_its_answer_is_void(connection: Connection) -> None:
    connection.read(b"POST")
    connection.record.open_journal(CHANCE, is_alone=True).end()

    assert not connection.record.is_held


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 80))
def test_bytes_that_were_sent_before_are_not_sent_again(parts: list[bytes], num: int) -> None:
    record = ConnectionRecord(None)
    record.num_omitted = num

    out = b"".join([record.take_unsent(part) for part in parts])

    assert out == b"".join(parts)[num:]
    assert record.num_omitted == max(0, num - len(b"".join(parts)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(
    st.lists(st.sampled_from(["begin", "void", "end", "lose", "take in"]), max_size=30),
    st.data(),
)
def test_a_holder_has_all_connections_that_have_begun_and_not_ended(
    turns: list[str], data: st.DataObject
) -> None:
    """If a connection's journal is void when its process ends, the holder closes the connection."""
    before = descriptors()
    holder = ConnectionHolder()
    end = holder.open()
    link = HolderLink(end)
    journals: dict[int, tuple[JournalMemory, int]] = {}
    for turn in turns:
        number = data.draw(st.sampled_from(sorted(journals))) if journals else 0
        if turn == "begin":
            memory, descriptor = JournalMemory.create()
            memory.begin(0, 0)
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
    # The comparison is <=, because descriptors of earlier tests can be closed meanwhile.
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


class Killed(BaseException):
    """Raised in place of a kill. The exception ends the process's work at the point of the kill."""


def be_killed(*_: object) -> Never:
    raise Killed


def test_a_process_may_die_after_the_supervisor_has_got_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next process continues the connection, although no process has read the kernel's counters
    of this connection.
    """
    with monkeypatch.context() as patch:
        patch.setattr("dist_aclgraph.serve.resume.record.read_counters", be_killed)
        connection = Connection(dies=Killed)
    connection.die()
    connection.read(b"request")

    assert connection.die().all_read() == b"request"
    connection.close()


class HoldsNone(HolderLink):
    """A link without a holder. The link only counts the connections."""

    count = 0

    def begin(self, connection: int, journal: int) -> int | None:
        self.count += 1
        return None


def is_accepted_at(port: int, descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as own:
            is_tcp = own.family == socket.AF_INET
            return is_tcp and bool(own.getpeername()) and own.getsockname()[1] == port
    except OSError:  # the descriptor is closed, or the socket has no peer
        return False


def test_a_connection_is_held_as_soon_as_it_is_accepted() -> None:
    """If the process is killed before a holder has the connection, the connection ends with the
    process.
    """
    link, listener = HoldsNone(socket.socketpair()[0]), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(ServeConfig(), listener, link=link)
    server.start(Front("the test answers no request"))
    not_held = []

    def look() -> None:
        """After each callback of the loop, count the accepted connections that are not held."""
        accepted = sum(is_accepted_at(port, int(name)) for name in os.listdir("/dev/fd"))
        not_held.append(accepted - link.count)
        if link.count == 0:
            server.loop.call_soon(look)

    server.loop.call_soon_threadsafe(look)
    until(lambda: bool(not_held))  # ``look`` has run once before the connection arrives
    with socket.create_connection(("127.0.0.1", port)):
        until(lambda: link.count > 0 and not_held[-1] <= 0)
    server.stop()

    assert max(not_held) == 0


def test_an_accepted_connection_is_first_of_all_sent_to_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a connection's journal is made before the connection is accepted."""
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            order.append(name)
            return call(*arguments)

        return note

    record = "dist_aclgraph.serve.resume.record"
    monkeypatch.setattr(f"{record}.read_counters", noted("read", read_counters))
    monkeypatch.setattr(JournalMemory, "create", noted("create", JournalMemory.create))
    monkeypatch.setattr(socket.socket, "accept", noted("accept", socket.socket.accept))
    link, listener = HoldsNone(socket.socketpair()[0]), listen("127.0.0.1", 0)
    monkeypatch.setattr(link, "begin", noted("begin", link.begin))
    server = HttpServer(ServeConfig(), listener, link=link)
    server.start(Front("the test answers no request"))
    with socket.create_connection(listener.getsockname()):
        until(lambda: "begin" in order)
    server.stop()

    assert order[: order.index("begin") + 1] == ["create", "accept", "begin"]
