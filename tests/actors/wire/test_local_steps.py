"""Messages of steps over Unix sockets arrive whole and in order; messages that are too long are
refused. Strangers do no harm, and deaths are noticed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.wire import local_steps
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.local_steps import (
    LENGTH,
    FrameReader,
    LocalEngine,
    LocalPeers,
    SocketFile,
)
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES
from dist_aclgraph.actors.wire.step_channel import StepReceiver, StepSender
from dist_aclgraph.errors import EngineDeadError, NotAMessageError, WorkerLostError
from dist_aclgraph.steps.step import StepResult
from tests.actors.wire.test_step_channel import EPOCH, NODE, make_plan

WAIT_S = 180.0
fork = multiprocessing.get_context("fork")


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[LocalPeers]:
    found = LocalPeers(str(tmp_path / "steps"))
    yield found
    found.close()


def connect(peers: LocalPeers, count: int = 1) -> list[LocalEngine]:
    before = peers.num_workers
    workers = [LocalEngine(peers.address) for _ in range(count)]
    until(peers, lambda: peers.num_workers == before + count)
    return workers


def until(peers: LocalPeers, condition) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        peers.wait(0.01)


def next_of(peers: LocalPeers) -> bytes:
    until(peers, lambda: peers._arrived)
    frame = peers.poll_frame()
    assert frame is not None
    return frame


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200)))
def test_frames_come_out_whole_however_the_bytes_are_cut(sent: list[bytes], cuts: list[int]):
    stream = b"".join(LENGTH.pack(len(frame)) + frame for frame in sent)
    frames, out, begin = FrameReader(), [], 0
    for size in [*cuts, len(stream)]:
        out += frames.feed(stream[begin : begin + size])
        begin += size

    assert out == sent


SIZES = st.lists(st.sampled_from([0, 1, 70, 65_532, 65_536, 300_000]), max_size=5)


@given(plans=SIZES, results=SIZES)
def test_all_that_is_sent_comes_in_order_and_whole_in_both_directions(
    tmp_path_factory: pytest.TempPathFactory, plans: list[int], results: list[int]
):
    peers = LocalPeers(str(tmp_path_factory.mktemp("peers") / "steps"))
    out = [os.urandom(size) for size in plans]
    back = [os.urandom(size) for size in results]
    received: list[list[bytes]] = [[], []]

    def work(worker: LocalEngine, rank: int) -> None:
        received[rank] = [worker.receive() for _ in out]
        for frame in back:
            worker.send(frame)

    try:
        workers = connect(peers, 2)
        threads = [threading.Thread(target=work, args=(w, i)) for i, w in enumerate(workers)]
        for frame in out:
            peers.send([frame])
        for thread in threads:
            thread.start()
        got = [next_of(peers) for _ in range(2 * len(back))]
        until(peers, lambda: not any(thread.is_alive() for thread in threads))
    finally:
        peers.close()

    assert received == [out, out]
    assert sorted(got) == sorted(back * 2)


def test_a_frame_that_is_too_long_is_refused_before_it_is_there():
    frames = FrameReader()

    with pytest.raises(NotAMessageError, match=f"{MAX_MESSAGE_BYTES} are taken"):
        frames.feed(LENGTH.pack(MAX_MESSAGE_BYTES + 1))


def test_only_this_user_may_open_the_file(peers: LocalPeers):
    assert stat.S_IMODE(os.stat(peers.address.path).st_mode) == 0o600


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\x05",
        LENGTH.pack(3) + b"abc",
        LENGTH.pack(MAX_MESSAGE_BYTES + 1),
        LENGTH.pack(0) * 100,
        b"\xff" * 1000,
    ],
)
def test_a_stranger_is_no_worker_and_harms_none(peers: LocalPeers, words: bytes):
    [worker] = connect(peers)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(peers.address.path)
        stranger.sendall(words)
        until(peers, lambda: len(peers._peers) == 2)
        peers.wait(0)  # this call reads the bytes that the stranger sent
        peers.send([b"plan"])
        stranger.setblocking(False)
        try:
            told = stranger.recv(100)
        except (BlockingIOError, ConnectionResetError):
            told = b""
        assert told == b""
    worker.send(b"result")

    assert worker.receive() == b"plan"
    assert next_of(peers) == b"result"
    assert (peers.num_workers, peers.num_lost) == (1, 0)


def test_a_worker_with_another_token_is_cut_off(peers: LocalPeers):
    worker = LocalEngine(SocketFile(peers.address.path, "guess"))
    until(peers, lambda: len(peers._peers) == 1)
    until(peers, lambda: not peers._peers)

    with pytest.raises(EngineDeadError):
        worker.receive()
    assert peers.num_workers == 0


def test_a_worker_of_no_data_parallel_rank_of_the_channel_is_cut_off(peers: LocalPeers):
    worker = LocalEngine(peers.address_for(1))
    until(peers, lambda: len(peers._peers) == 1)
    until(peers, lambda: not peers._peers)

    with pytest.raises(EngineDeadError):
        worker.receive()
    assert peers.num_workers == 0


def test_a_token_is_not_shown(peers: LocalPeers):
    assert peers.address.token not in repr(peers.address)


def test_a_worker_that_stands_still_keeps_nobody_waiting_and_is_cut_off_in_the_end(
    peers: LocalPeers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_steps, "MAX_UNREAD_BYTES", 4 << 20)
    silent, awake = connect(peers, 2)
    plan = bytes(1 << 20)

    for _ in range(8):
        peers.send([plan])
        done = threading.Event()
        thread = threading.Thread(target=lambda d=done: (awake.receive(), d.set()))
        thread.start()
        until(peers, done.is_set)
        thread.join()

    assert peers.num_lost == 1
    silent.close()


def die(address: SocketFile, has_answered: int) -> None:
    """Run a worker that answers a number of messages (``has_answered``), and then dies in the
    middle of a frame that it sends.
    """
    worker = LocalEngine(address)
    for _ in range(has_answered):
        worker.send(worker.receive())
    worker._connection.sendall(LENGTH.pack(1000) + b"torn")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("answers", [0, 3])
def test_the_death_of_a_worker_is_known_at_once_and_its_torn_frame_is_none(
    peers: LocalPeers, answers: int
):
    process = fork.Process(target=die, args=(peers.address, answers))
    process.start()
    until(peers, lambda: peers.num_workers == 1)
    for _ in range(answers):
        peers.send([b"plan"])
        assert next_of(peers) == b"plan"

    until(peers, lambda: peers.num_lost == 1)

    assert peers.poll_frame() is None
    process.join()


def lead(path: str, addresses) -> None:
    """Run an engine that puts its address into ``addresses``, and dies as soon as a worker has
    connected.
    """
    peers = LocalPeers(path)
    addresses.send(peers.address)
    while not peers.num_workers:
        peers.wait(0.1)
    peers.send([b"plan"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_an_engine_ends_the_wait_of_its_workers(tmp_path: Path):
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lead, args=(str(tmp_path / "steps"), theirs))
    process.start()
    worker = LocalEngine(ours.recv())

    assert worker.receive() == b"plan"
    with pytest.raises(EngineDeadError):
        worker.receive()
    process.join()
    with pytest.raises(EngineDeadError):
        worker.send(bytes(1 << 20))
    worker.close()


def test_a_step_that_a_dead_worker_will_not_answer_ends_long_before_its_time(tmp_path: Path):
    sender = StepSender((4, 5), Place(NODE, str(tmp_path)), ranks_per_batch=2)
    process = fork.Process(target=die, args=(sender.address_for(NODE, 1), 0))
    process.start()
    other = StepReceiver(sender.address_for(NODE, 0))
    sender.wait_for_workers(WAIT_S, lambda: None)
    sender.send(make_plan(1))
    other.send(StepResult(EPOCH, 1, 0))

    began_s = time.monotonic()
    with pytest.raises(WorkerLostError, match="rank 5 before a worker's connection ended"):
        sender.receive(make_plan(1), 1000 * WAIT_S, lambda: None)

    assert time.monotonic() - began_s < WAIT_S
    process.join()
    other.close()
    sender.close(EPOCH)


def test_nothing_is_left_behind(tmp_path: Path):
    sender = StepSender((0,), Place(NODE, str(tmp_path)))
    receiver = StepReceiver(sender.address_for(NODE, 0))
    sender.wait_for_workers(WAIT_S, lambda: None)

    sender.close(EPOCH)

    assert receiver.receive(EPOCH) is None
    receiver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_finds_nobody_where_the_engine_is_gone(tmp_path: Path):
    with pytest.raises(EngineDeadError, match="does not listen"):
        LocalEngine(SocketFile(str(tmp_path / "steps"), "token"))
