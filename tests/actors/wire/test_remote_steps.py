"""The engine counts the connected workers on other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.remote_steps import TOPIC, RemoteEngine, RemotePeers

HOST, WAIT_S = "127.0.0.1", 60.0


Connect = Callable[[], RemoteEngine]


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[RemotePeers]:
    peers = RemotePeers(Place("node", str(tmp_path), HOST))
    yield peers
    peers.close()


@pytest.fixture
def connect(peers: RemotePeers) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect() -> RemoteEngine:
            engine = RemoteEngine(peers.address_for("other node"))
            stack.callback(engine.close)  # ``close`` may be called twice
            return engine

        yield connect


def wait_for_count(peers: RemotePeers, count: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while peers.num_workers != count:
        peers.wait(0.05)
        assert time.monotonic() < deadline_s, f"counted {peers.num_workers}, not {count}"


def test_a_worker_that_leaves_is_counted_no_more(peers: RemotePeers, connect: Connect) -> None:
    for _ in range(2):
        first, second = connect(), connect()
        wait_for_count(peers, 2)
        first.close()
        wait_for_count(peers, 1)
        second.close()
        wait_for_count(peers, 0)


def test_invalid_subscriptions_do_not_count_as_workers(
    peers: RemotePeers, connect: Connect
) -> None:
    connect()
    wait_for_count(peers, 1)
    context = zmq.Context()
    stranger = context.socket(zmq.XSUB)
    try:
        peers.address_for("other node").plans.connect(stranger)
        stranger.send(b"\x02hello")
        stranger.send(b"\x01")  # a subscription to all topics
        stranger.send(b"\x01" + TOPIC.pack(0))
        wait_for_count(peers, 2)
    finally:
        context.destroy(linger=0)
    wait_for_count(peers, 1)
