"""An engine fetches files of KV blocks from another node. Each fetch ends, and incomplete files are
deleted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.actors.wire.block_fetches import (
    LIMIT_S,
    NUM_THREADS,
    PAUSE_S,
    QUEUE_S,
    SILENCE_S,
)
from dist_aclgraph.actors.wire.block_server import (
    MAX_REQUEST_BYTES,
    WINDOW,
    ReadFile,
)
from dist_aclgraph.kv.block_files import HEADER
from tests.actors.fetched_files import (
    GROUP,
    HYBRID,
    NAMES,
    NODE,
    PLACE,
    SIZE,
    TOKEN,
    WAIT_S,
    World,
    contents,
)
from tests.actors.kv_sockets import LOOPBACK, free_ports
from tests.actors.leftovers import wait_until


@pytest.fixture(params=[PLACE])
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[World]:
    monkeypatch.setattr(block_fetches, "SILENCE_S", WAIT_S)  # slow sources are not silent
    made = World(tmp_path, request.param)
    yield made
    made.close()


hybrid = pytest.mark.parametrize("world", [HYBRID], indirect=True, ids=["hybrid"])


def test_all_files_of_a_prompt_are_copied(world: World) -> None:
    world.write(*NAMES)
    world.fetch()
    assert world.found() == NAMES
    counts = world.fetches.counts
    assert (counts.blocks, counts.failures) == (len(NAMES), 0)
    num_bytes = 2 * len(NAMES) * (len(contents(NAMES[0], 0)) + HEADER.size)
    assert counts.num_bytes == num_bytes
    world.fetch()
    assert counts.num_bytes == num_bytes, "files that exist are not fetched"


@hybrid
def test_only_blocks_up_to_the_last_checkpoint_are_copied(world: World) -> None:
    world.write(*NAMES, states=(NAMES[1], NAMES[3]))
    world.fetch()
    assert world.found() == NAMES[:4]
    assert world.found("state") == [NAMES[3]]
    assert world.fetches.counts.failures == 0


@hybrid
def test_without_a_checkpoint_nothing_is_copied(world: World) -> None:
    world.write(*NAMES)
    world.fetch()
    assert world.found() == [] and world.fetches.counts.num_bytes == 0


def test_files_are_kept_for_the_weights_that_the_engine_has_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a fetch begins, the folder may already contain the weights of the next roll."""
    world.write(*NAMES)
    monkeypatch.setattr("dist_aclgraph.kv.tiers.cache_identity", lambda config: "next weights")
    world.fetch()
    assert world.found() == NAMES
    assert not list(tmp_path.rglob("next weights"))


def test_files_cross_an_encrypted_connection(tmp_path: Path) -> None:
    world = World(tmp_path, host=LOOPBACK, ports=free_ports(1))
    try:
        tcp = world.address.tcp
        assert tcp is not None and tcp.keys is not None
        world.write(*NAMES)
        world.fetch()
        assert world.found() == NAMES
    finally:
        world.close()


def test_a_source_that_refuses_the_connection_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a refusal before the first request, a send on the connection would block forever."""
    connect = Endpoint.connect

    def connect_late(endpoint: Endpoint, peer: zmq.Socket[bytes]) -> None:
        connect(endpoint, peer)
        wait_until(lambda: not peer.poll(0, zmq.POLLOUT), "ZeroMQ keeps the connection")

    monkeypatch.setattr(Endpoint, "connect", connect_late)
    world = World(tmp_path, host=LOOPBACK, ports=free_ports(1))
    try:
        tcp = world.address.tcp
        assert tcp is not None
        world.use(replace(world.address, tcp=replace(tcp, keys=None)))
        world.write(*NAMES)
        world.fetch()
        assert world.found() == [] and world.fetches.counts.failures == 1
    finally:
        world.close()


def test_no_block_after_a_missing_file_is_fetched(world: World) -> None:
    world.write(*NAMES)
    world.there["block"][1].delete(NAMES[2])
    world.fetch()
    assert world.found() == NAMES[:2]


@hybrid
def test_the_last_checkpoint_before_a_missing_file_is_fetched(world: World) -> None:
    world.write(*NAMES, states=(NAMES[1], NAMES[3]))
    world.there["block"][1].delete(NAMES[2])
    world.fetch()
    assert world.found() == NAMES[:2]
    assert world.found("state") == [NAMES[1], NAMES[3]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:7],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + b"x",
    ],
    ids=["cut", "no header", "changed", "longer"],
)
def test_a_damaged_file_is_not_kept(world: World, damage: Callable[[bytes], bytes]) -> None:
    world.write(*NAMES)
    file = world.file(NAMES[2])
    file.write_bytes(damage(file.read_bytes()))
    world.fetch()
    assert world.found() == NAMES[:2]
    assert not world.here["block"][0].has(NAMES[2])


def test_a_file_of_another_block_is_not_kept(world: World) -> None:
    world.write(*NAMES)
    os.replace(world.file(NAMES[3]), world.file(NAMES[2]))
    world.fetch()
    assert world.found() == NAMES[:2]


def test_a_file_that_is_longer_than_a_message_counts_as_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_aclgraph.actors.wire.block_server.MAX_FILE_BYTES", 2 * SIZE)
    world.write(*NAMES[:2])
    for place in range(2):
        data = memoryview(bytes(3 * SIZE))
        assert world.there["block"][place].write(NAMES[2], data)
    world.fetch()
    assert world.found() == NAMES[:2] and world.fetches.counts.failures == 0


def test_a_full_tier_keeps_what_fits(world: World) -> None:
    world.write(*NAMES)
    world.fetches._files[PLACE] = world.here
    for tiers in world.here["block"]:
        tiers._first.max_bytes = 0
    world.fetch()
    assert world.found() == [] and world.fetches.counts.failures == 0


def test_a_fetch_ends_with_its_request(world: World) -> None:
    world.write(*NAMES)
    looks = iter([True, True, True])
    world.fetch(is_wanted=lambda: next(looks, False))
    assert world.found() == NAMES[:1], "one look at the beginning, and one for each file"


def test_a_block_is_not_found_before_all_its_files_are_here(world: World) -> None:
    """A look-up checks only the first worker's files, so the first worker's file must be fetched
    last.
    """
    world.write(*NAMES)
    # In the last turn, the fetch stops one file before its end.
    for num_looks in range(1, 2 * len(NAMES)):
        world.fetch(is_wanted=partial(next, iter([True] * num_looks), False))
        first, second = world.here["block"]
        assert [name for name in NAMES if first.has(name) and not second.has(name)] == []
        for name in NAMES:
            first.delete(name)
            second.delete(name)


def test_a_fetch_that_takes_too_long_ends(world: World) -> None:
    """A source that answers from time to time does not count as silent, but may be too slow."""
    world.write(*NAMES)

    def wait() -> bool:
        world.now_s += LIMIT_S / 4
        return True

    world.fetch(is_wanted=wait)
    world.fetches.close(WAIT_S)
    assert world.found() == NAMES[:2]
    assert world.fetches.counts.failures == 1, "a request has waited in vain"


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "other weights"},
        {"addresses": (Address("far", Endpoint("ipc:///nothing")),)},
        {"addresses": (Address(NODE, Endpoint("ipc:///nothing")),)},
    ],
    ids=["another model", "reached on its node alone", "the same files"],
)
def test_a_source_that_cannot_be_used_is_not_asked(world: World, changes: Any) -> None:
    world.use(world.address, **changes)
    assert world.fetches.ways_from(GROUP, lambda: True)[0] is None
    assert world.fetches.ways_from("3", lambda: True)[0] is None, "a group without a server"
    assert world.fetches.ways_from("unknown", lambda: True)[0] is None


def test_a_log_line_says_that_a_group_has_other_files_of_the_model(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # lists often come again
        world.use(world.address, identity="other files")
    assert [line.getMessage() for line in caplog.records if GROUP in line.getMessage()] == [
        f"no KV blocks are fetched from group {GROUP}: its files of the model (names, "
        "sizes, times) or its settings are not those of this group"
    ]


def test_a_source_that_has_ended_is_left_alone_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetches, "SILENCE_S", 0.05)
    world.write(*NAMES)
    world.server.close()
    world.fetch()
    assert world.found() == [] and world.fetches.counts.failures == 1
    world.fetch()
    assert world.fetches.counts.failures == 1, "the source is not asked"
    world.now_s += PAUSE_S
    world.fetch()
    assert world.fetches.counts.failures == 2


def test_a_wrong_token_gets_no_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fetches, "SILENCE_S", 0.05)
    world.write(*NAMES)
    world.fetches._token = "guess"
    world.fetch()
    assert world.found() == [] and world.fetches.counts.failures == 1


class Hang:
    """Blocks all threads for fetches until ``close``, like a file system that hangs."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self._goes_on, self._calls = threading.Event(), list[bool]()
        monkeypatch.setattr("dist_aclgraph.kv.tiers.KVTiers.has_first", self._wait)
        begin = world.fetches.ways_from(GROUP, lambda: True)[0]
        assert begin is not None
        self.begin = partial(begin, NAMES, 0)
        self.first = [self.begin() for _ in range(NUM_THREADS)]
        wait_until(lambda: len(self._calls) == NUM_THREADS, "not all threads hang")

    def _wait(self, *_: Any) -> bool:
        self._calls.append(True)
        return self._goes_on.wait(WAIT_S)

    def close(self) -> None:
        self._goes_on.set()


@pytest.fixture
def hang(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang(world, monkeypatch)
    yield made
    made.close()


def test_a_disk_that_hangs_holds_no_request(
    world: World, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first requests wait for the whole time limit. Later requests do not wait for a fetch."""
    monkeypatch.setattr(block_fetches, "SILENCE_S", SILENCE_S)
    assert not any(ended() for ended in hang.first)
    world.now_s += LIMIT_S + SILENCE_S + 1
    assert all(ended() for ended in hang.first)
    assert world.fetches.counts.failures == NUM_THREADS
    assert hang.begin()() and world.fetches._fetches.empty()


def test_a_request_whose_fetch_does_not_begin_waits_no_longer(world: World, hang: Hang) -> None:
    """One time limit ends the wait for a free thread. Another, longer limit applies to a fetch that
    has begun.
    """
    queued = hang.begin()
    world.now_s += QUEUE_S + 1
    assert queued() and world.fetches.counts.failures == 1
    assert not any(ended() for ended in hang.first)
    world.now_s += LIMIT_S - QUEUE_S
    assert all(ended() for ended in hang.first)


class FakeSource:
    """A source whose answers the test chooses. It answers the first ``WINDOW`` requests, and then
    ends.
    """

    def __init__(
        self, folder: Path, answer: Callable[[int], list[bytes]], num_answers: int = 1
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        url = f"ipc://{folder}/fake"
        self._socket.bind(url)
        self.address = Address("source", Endpoint(url), Endpoint(url))
        self._answer, self._num_answers = answer, num_answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for _ in range(WINDOW):
            peer, request = self._socket.recv_multipart()
            number = msgspec.msgpack.decode(request, type=ReadFile).number
            for _ in range(self._num_answers):
                self._socket.send_multipart([peer, *self._answer(number)])
        self._socket.close(linger=1000)
        self._context.term()


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: [b"\xc1", b""],
        lambda number: [msgspec.msgpack.encode(number)],
        lambda number: [msgspec.msgpack.encode(number), b"", b""],
        lambda number: [msgspec.msgpack.encode(number + 1), b""],
        lambda number: [msgspec.msgpack.encode("text"), b""],
    ],
    ids=["no message", "one frame", "three frames", "a later answer", "no number"],
)
def test_a_source_that_sends_junk_is_left_alone(
    world: World, tmp_path: Path, answer: Callable[[int], list[bytes]]
) -> None:
    source = FakeSource(tmp_path, answer)
    world.use(source.address)
    world.fetch()
    assert world.found() == [] and world.fetches.counts.failures == 1


def test_a_source_that_repeats_an_answer_is_left_alone(world: World, tmp_path: Path) -> None:
    """Otherwise, the fetch would last for as long as the source repeats the answer."""
    world.write(*NAMES)
    file = world.file(NAMES[0], 1).read_bytes()
    answer = [msgspec.msgpack.encode(0), file]
    source = FakeSource(tmp_path, lambda number: answer, num_answers=100)
    world.use(source.address)
    world.fetch()
    assert world.fetches.counts.failures == 1


class Asker:
    """Sends requests to the server of a world, and reads the answers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        endpoint.connect(self._socket)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, number: int, place: int = 0, name: bytes = NAMES[0]) -> None:
        self.send(msgspec.msgpack.encode(ReadFile(TOKEN, number, "block", place, name)))

    def receive(self) -> tuple[int, bytes]:
        assert self._socket.poll(int(WAIT_S * 1000)), "no answer"
        number, file = self._socket.recv_multipart()
        return msgspec.msgpack.decode(number), file

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def asker(world: World) -> Iterator[Asker]:
    made = Asker(world.address.file)
    yield made
    made.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"junk",
        b"",
        msgspec.msgpack.encode(["read", TOKEN, 1, "block", 0, b"short"]),
        msgspec.msgpack.encode(["read", TOKEN, 1, "block", 0, "../../../../passwd" + 14 * "x"]),
        msgspec.msgpack.encode(["read", TOKEN, 1, "../block", 0, NAMES[0]]),
        msgspec.msgpack.encode(["read", TOKEN, 1, "block", -1, NAMES[0]]),
        msgspec.msgpack.encode(["read", "guess", 1, "block", 0, NAMES[0]]),
        msgspec.msgpack.encode(["read", "gu\u00e9ss", 1, "block", 0, NAMES[0]]),
    ],
)
def test_a_request_that_is_not_valid_gets_no_answer(
    world: World, asker: Asker, request_: bytes
) -> None:
    world.write(*NAMES)
    asker.send(request_)
    asker.send(request_, b"another frame")
    asker.ask(2)
    number, file = asker.receive()
    assert number == 2 and file == world.file(NAMES[0]).read_bytes()


def test_a_place_that_does_not_exist_has_no_files(world: World, asker: Asker) -> None:
    world.write(*NAMES)
    asker.ask(1, place=2)
    asker.ask(2, name=bytes(16))
    assert [asker.receive(), asker.receive()] == [(1, b""), (2, b"")]


def test_a_long_request_ends_its_connection_alone(world: World, asker: Asker) -> None:
    world.write(*NAMES)
    asker.send(bytes(MAX_REQUEST_BYTES + 1))
    other = Asker(world.address.file)
    try:
        other.ask(1)
        assert other.receive()[1]
    finally:
        other.close()


def test_requests_sent_ahead_are_answered_in_order(world: World, asker: Asker) -> None:
    world.write(*NAMES)
    for number in range(WINDOW):
        asker.ask(number, name=NAMES[number])
    assert [asker.receive() for _ in range(WINDOW)] == [
        (number, world.file(NAMES[number]).read_bytes()) for number in range(WINDOW)
    ]


class Asked:
    """A fake event. The first ``times`` calls of ``wait`` return true, and later calls return
    false.
    """

    def __init__(self, times: int) -> None:
        self.left = times

    def clear(self) -> None:
        pass

    def wait(self, timeout_s: float) -> bool:
        self.left -= 1
        return self.left >= 0


def test_a_source_is_quiet_after_a_time_without_requests(world: World) -> None:
    was_asked: Any = Asked(times=3)
    world.server._was_asked = was_asked
    world.server.wait_until_quiet(WAIT_S)
    assert was_asked.left == -1
