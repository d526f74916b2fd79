"""What is written down of an answer, and how much of it a connection has taken."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.serve import journal
from dist_aclgraph.serve.journal import Chance, Entry, Journal, Opening
from dist_aclgraph.serve.kept import MAX_LOSSES, Keep, Keeper
from dist_aclgraph.serve.sent_bytes import BEGUN, RestTransport, num_sent_bytes
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs

OPENING = Opening(b"POST / HTTP/1.1\r\n\r\n{}", 17, Chance("abc", 1700000000, 5))
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


@given(st.lists(ENTRIES, max_size=8), st.data())
def test_a_journal_whose_writer_was_killed_goes_on_behind_its_last_whole_entry(
    entries: list[Entry], data: st.DataObject
) -> None:
    file = journal.begin(OPENING)
    assert file is not None
    ends = [os.fstat(file).st_size]
    written = Journal(OPENING.chance, file=file)
    for entry in entries:
        written.note(entry.index, entry.delta("a"))
        ends.append(os.fstat(file).st_size)
    torn_at = data.draw(st.integers(ends[0], ends[-1]))
    os.ftruncate(file, torn_at)

    opening, found = journal.read(file)

    num_whole = sum(end <= torn_at for end in ends) - 1
    assert (opening, list(found)) == (OPENING, entries[:num_whole])
    again = Journal(opening.chance, found, file=os.dup(file))
    again.note(3, RequestDelta("a", pack_ints([9])))
    assert journal.read(file)[1][:-1] == found
    assert journal.read(file)[1][-1].delta("b") == RequestDelta("b", pack_ints([9]))
    written.end()
    again.end()


def test_an_empty_journal_is_none() -> None:
    file = os.memfd_create("empty")
    with pytest.raises(ValueError, match="empty"):
        journal.read(file)
    os.close(file)


def test_what_exceeds_its_room_is_kept_no_more() -> None:
    ended: list[None] = []
    file = journal.begin(OPENING)
    kept = Journal(OPENING.chance, file=file, on_end=lambda: ended.append(None))

    kept.note(0, RequestDelta("a", bytes(journal.MAX_BYTES)))
    kept.note(0, RequestDelta("a", bytes(4)))
    kept.end()

    assert not kept.is_kept
    assert ended == [None]
    assert journal.begin(Opening(bytes(journal.MAX_BYTES), 0, OPENING.chance)) is None


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


@given(st.lists(st.sampled_from(["begin", "end", "lose", "take in"]), max_size=30))
def test_who_keeps_has_what_has_begun_and_not_ended(turns: list[str]) -> None:
    before = descriptors()
    keep, read, write = Keep(), *os.pipe()
    link = keep.open()
    keeper = Keeper(link)
    running: dict[int, int] = {}  # losses, by number
    for turn in turns:
        if turn == "begin":
            number = keeper.begin(read, write)
            assert number is not None
            running[number] = 0
        elif turn == "end" and running:
            number = next(iter(running))
            keeper.end(number)
            del running[number]
        elif turn == "take in":
            keep.take_in()
        elif turn == "lose":
            link.close()
            running = {n: lost + 1 for n, lost in running.items() if lost + 1 < MAX_LOSSES}
            link = keep.open()
            keeper = Keeper(link, dict.fromkeys(running))  # type: ignore[arg-type]
    keep.take_in()

    assert len(keep) == len(running)
    link.close()
    keep.close()
    os.close(read)
    os.close(write)
    assert descriptors() == before


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
