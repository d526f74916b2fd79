"""What is written down of an answer, and how much of it a connection has taken."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.serve import journal
from dist_aclgraph.serve.http_server import listen
from dist_aclgraph.serve.inlet import Inlet
from dist_aclgraph.serve.intake import Intake
from dist_aclgraph.serve.journal import (
    Arrival,
    Chance,
    Entry,
    Journal,
    JournalFile,
    Opening,
    use_of,
)
from dist_aclgraph.serve.kept import MAX_LOSSES, Keep, Keeper, Kept
from dist_aclgraph.serve.sent_bytes import BEGUN, RestTransport, num_read_bytes, num_sent_bytes
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs

ARRIVALS = [Arrival(17, 117, b"POST / HTTP/1.1\r\n"), Arrival(0, 121, b"\r\n{}")]
REQUEST = b"POST / HTTP/1.1\r\n\r\n{}"
NUM_READ = 100
OPENING = Opening(20, Chance("abc", 1700000000, 5))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
REPORTS = st.builds(
    lambda ids: RowLogprobs(pack_ints(ids), tuple(-0.5 * i for i in ids), 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
ENTRIES = st.builds(
    Entry,
    index=st.integers(0, 5),
    token_ids=TOKENS.map(pack_ints),
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    logprobs=st.lists(st.none() | REPORTS, max_size=2).map(tuple),
    num_cached_tokens=st.integers(0, 99),
    error=st.text(max_size=5),
    error_kind=st.sampled_from(["", "EngineDeadError"]),
)


def make_file() -> JournalFile:
    file = JournalFile.make(NUM_READ)
    assert file is not None
    return file


@given(st.lists(ENTRIES, max_size=8), st.data())
def test_a_journal_whose_writer_was_killed_goes_on_behind_its_last_whole_entry(
    entries: list[Entry], data: st.DataObject
) -> None:
    file = make_file()
    ends = [os.fstat(file.descriptor).st_size]
    for record in (*ARRIVALS, OPENING, *entries):
        assert file.append(record)
        ends.append(os.fstat(file.descriptor).st_size)
    torn_at = data.draw(st.integers(ends[0], ends[-1]))
    os.ftruncate(file.descriptor, torn_at)
    num_whole = sum(end <= torn_at for end in ends) - 1

    known = journal.read(file.descriptor)

    arrived = ARRIVALS[:num_whole]
    assert use_of(file.descriptor) == (0 if arrived else None, False)
    is_open = num_whole > len(ARRIVALS)
    assert known.request == b"".join(arrival.data for arrival in arrived)
    assert known.chance == (OPENING.chance if is_open else None)
    assert known.num_read == (arrived[-1].num_read if arrived else NUM_READ)
    if arrived:
        assert known.num_sent == (OPENING.num_sent if is_open else ARRIVALS[0].num_sent)
    assert list(known.entries) == entries[: max(0, num_whole - len(ARRIVALS) - 1)]
    again = JournalFile(file.descriptor)
    next_record = entries[0] if num_whole > len(ARRIVALS) and entries else ARRIVALS[1]
    assert again.append(next_record)
    assert journal.read(file.descriptor).request
    file.close()


def test_an_entry_is_the_delta_that_it_was_made_of() -> None:
    file = make_file()
    for record in (*ARRIVALS, OPENING):
        file.append(record)
    written = Journal(OPENING.chance, file=file)
    delta = RequestDelta("a", pack_ints([9]), "length", (None,), 3, "e", "EngineDeadError")

    written.note(3, delta)

    known = journal.read(file.descriptor)
    assert [(entry.index, entry.delta("a")) for entry in known.entries] == [(3, delta)]
    file.close()


@given(st.lists(st.sampled_from(["append", "void", "clear", "large"]), max_size=12))
def test_of_a_file_that_is_void_nobody_knows_anything_until_it_is_cleared(turns: list[str]) -> None:
    file = make_file()
    is_void, num_records, num_clears = False, 0, 0
    for turn in turns:
        if turn == "clear":
            file.clear(NUM_READ + 1)
            is_void, num_records, num_clears = False, 0, num_clears + 1
        elif turn == "append":
            assert file.append(ARRIVALS[0]) == (not is_void)
            num_records += not is_void
        elif turn == "void":
            file.void()
            is_void = True
        else:
            assert not file.append(Arrival(0, 0, bytes(journal.MAX_BYTES)))
            is_void = True
        if is_void:
            with pytest.raises(ValueError, match="not all"):
                journal.read(file.descriptor)
            assert os.fstat(file.descriptor).st_size < 100  # nobody needs what is in it
        else:
            known = journal.read(file.descriptor)
            assert known.request == ARRIVALS[0].data * num_records
        assert use_of(file.descriptor) == (
            num_clears if num_records and not is_void else None,
            is_void,
        )
    file.close()


@pytest.mark.parametrize(("dies_at", "request_left"), [("pwrite", REQUEST), ("ftruncate", b"")])
def test_a_journal_whose_writer_was_killed_while_it_cleared_it_says_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch, dies_at: str, request_left: bytes
) -> None:
    file = make_file()
    for record in (*ARRIVALS, OPENING):
        file.append(record)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, dies_at, die)
        file.clear(ARRIVALS[-1].num_read)

    known = journal.read(file.descriptor)
    assert (known.request, known.num_read) == (request_left, ARRIVALS[-1].num_read)
    again = JournalFile(file.descriptor)
    again.append(Arrival(0, 130, b"more"))
    assert journal.read(file.descriptor).request == request_left + b"more"
    file.close()


def test_a_file_that_nobody_has_begun_is_none() -> None:
    file = os.memfd_create("empty")
    with pytest.raises(ValueError, match="not all"):
        journal.read(file)
    os.close(file)


def test_what_exceeds_its_room_is_kept_no_more() -> None:
    ended: list[None] = []
    file = make_file()
    kept = Journal(OPENING.chance, file=file, on_end=lambda: ended.append(None))

    kept.note(0, RequestDelta("a", bytes(journal.MAX_BYTES)))
    kept.note(0, RequestDelta("a", bytes(4)))
    kept.end()

    assert not kept.is_kept
    assert ended == [None]
    with pytest.raises(ValueError, match="not all"):
        journal.read(file.descriptor)
    file.close()


class Written:
    """A transport that takes everything."""

    def __init__(self) -> None:
        self.data = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.data += data

    def abort(self) -> None:
        self.is_aborted = True


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 80))
def test_of_what_is_written_again_only_the_rest_goes_out(parts: list[bytes], num: int) -> None:
    out = Written()
    rest = RestTransport(out, num)  # type: ignore[arg-type]
    parts = [BEGUN, *parts]

    for part in parts:
        rest.write(part)

    assert out.data == b"".join(parts)[num:]
    assert rest.owes_nothing == (num <= len(b"".join(parts)))
    assert not out.is_aborted


def test_a_refusal_does_not_follow_what_had_begun() -> None:
    out = Written()

    RestTransport(out, 20).write(b"HTTP/1.1 503 Service Unavailable\r\n")  # type: ignore[arg-type]

    assert out.is_aborted
    assert not out.data


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_a_connection_has_taken(
    writes: list[tuple[int, bool]],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        server.setblocking(False)
        begun, taken = num_sent_bytes(server.fileno()), 0
        for count, reads in writes:
            try:
                taken += server.send(bytes(count))
            except BlockingIOError:
                reads = True
            if reads:
                client.recv(30_000)
            assert num_sent_bytes(server.fileno()) - begun == taken


@pytest.fixture(scope="module", autouse=True)
def ignoring() -> Iterator[None]:
    """Who keeps is told by a signal when there is something to take in."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(
    st.lists(
        st.sampled_from(["begin", "answer", "ask", "void", "end", "lose", "take in"]), max_size=30
    ),
    st.data(),
)
def test_who_keeps_has_what_has_begun_and_not_ended(turns: list[str], data: st.DataObject) -> None:
    """But for a request with which too many have died, and for what nobody can go on with."""
    before = descriptors()
    keep = Keep()
    link = keep.open()
    keeper = Keeper(link)
    files: dict[int, JournalFile] = {}
    losses: dict[int, int | None] = {}  # with the request that is under way, None while none is
    for turn in turns:
        number = data.draw(st.sampled_from(sorted(files))) if files else 0
        if turn == "begin":
            file = make_file()
            begun = keeper.begin(file.descriptor, file.descriptor)
            assert begun is not None
            files[begun], losses[begun] = file, None
        elif turn == "ask" and files:
            files[number].append(ARRIVALS[0])
            if losses[number] is None:
                losses[number] = 0
        elif turn == "answer" and files:
            files[number].clear(NUM_READ)
            losses[number] = None
        elif turn == "void" and files:
            files[number].void()
            losses[number] = MAX_LOSSES
        elif turn == "end" and files:
            keeper.end(number)
            files.pop(number).close()
        elif turn == "take in":
            keep.take_in()
        elif turn == "lose":
            link.close()
            for n, count in list(losses.items()):
                if n in files and count is not None:
                    losses[n] = count + 1
                    if count + 1 >= MAX_LOSSES:
                        files.pop(n).close()
            link = keep.open()
            keeper = Keeper(link, dict.fromkeys(files))  # type: ignore[arg-type]
    keep.take_in()

    assert len(keep) == len(files)
    link.close()
    keep.close()
    for file in files.values():
        file.close()
    assert descriptors() == before


@given(st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_of_a_connection_have_been_read(
    sent: list[tuple[int, bool]],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        begun, num_read = num_read_bytes(server.fileno()), 0
        for count, reads in sent:
            client.sendall(bytes(count))
            if reads:
                num_read += len(server.recv(4_000))
            assert num_read_bytes(server.fileno()) - begun == num_read


@given(
    parts=st.lists(st.binary(min_size=1, max_size=99), min_size=1, max_size=4),
    is_noted=st.booleans(),
    is_torn=st.booleans(),
    ends=st.booleans(),
)
def test_all_that_was_read_is_known(
    parts: list[bytes], is_noted: bool, is_torn: bool, ends: bool
) -> None:
    """Whether the process died before it had written the last part down, or while it did."""
    intake = Intake()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        file = JournalFile.make(num_read_bytes(server.fileno()))
        assert file is not None
        for i, part in enumerate(parts):
            client.sendall(part)
            server.recv_into(intake.begin(7), len(part), socket.MSG_WAITALL)
            if is_noted or i < len(parts) - 1:
                num_sent, num_read = (f(server.fileno()) for f in (num_sent_bytes, num_read_bytes))
                file.append(Arrival(num_sent, num_read, intake.read(len(part))))
        if not is_noted and is_torn:
            os.write(file.descriptor, b"\x30\0\0\0\x94")
        if ends:
            client.shutdown(socket.SHUT_WR)
        kept = Kept(server.fileno(), file.descriptor, last_read=intake.last()[1])

        if ends:  # the kernel counts it like a byte: it must not be taken for one
            with pytest.raises(ValueError, match="the client has left"):
                kept.known()
        else:
            for _ in range(2):
                known = kept.known()
                assert known.request == b"".join(parts)
                assert known.num_read == num_read_bytes(server.fileno())
        file.close()


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
            assert num_read_bytes(server.fileno()) == len(data)
    assert data == b"abcdefghijkl"


def test_nothing_of_another_connection_is_left_to_read() -> None:
    intake, seen = Intake(), []
    inlet = Inlet(intake, SimpleNamespace(number=3, data_received=seen.append))  # type: ignore[arg-type]
    inlet.get_buffer(0)[:6] = b"secret"

    inlet.buffer_updated(6)

    assert seen == [b"secret"]
    assert not any(intake.last()[1])


def test_a_keeper_that_cannot_say_anything_keeps_nothing_and_says_it_later() -> None:
    keep, read, write = Keep(), *os.pipe()
    keeper = Keeper(keep.open())
    numbers = []
    while (number := keeper.begin(read, write)) is not None:
        numbers.append(number)
        assert len(numbers) < 100_000

    for number in numbers:
        keeper.end(number)
    assert len(keep) == 0
    keep.take_in()
    assert len(keep) == len(numbers)
    keeper.flush()
    keep.take_in()

    assert len(keep) == 0
    keep.close()
    os.close(read)
    os.close(write)
