"""Peers that do not belong to the deployment: they have wrong keys, or send junk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.errors import EngineDeadError
from tests.actors.leftovers import wait_until
from tests.actors.loop_group import NODE, TOKEN, WAIT_S
from tests.deployments import Answer, greedy_params

NUM_JUNK = int(os.environ.get("DIST_ACLGRAPH_JUNK", "2000"))


def with_fresh_keys(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint with new client keys, which the server does not know."""
    assert endpoint.keys is not None
    public, secret = zmq.curve_keypair()
    return replace(
        endpoint, keys=replace(endpoint.keys, client_public=public, client_secret=secret)
    )


def with_fresh_server_key(endpoint: Endpoint) -> Endpoint:
    assert endpoint.keys is not None
    return replace(endpoint, keys=replace(endpoint.keys, server_public=zmq.curve_keypair()[0]))


def without_keys(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, keys=None)


STRANGERS = (with_fresh_keys, with_fresh_server_key, without_keys)
Stranger = Callable[[Endpoint], Endpoint]


def refusal_of(endpoint: Endpoint, token: str = TOKEN) -> str:
    """Check that the engine refuses a client, and that the client's request fails in time; return
    the reason.
    """
    client = EngineClient([Address(NODE, endpoint)], token, node_id=NODE, link_s=WAIT_S)
    try:
        wait_until(lambda: bool(client.capacity().lost), "the client learns nothing")
        with pytest.raises(EngineDeadError):
            client.submit("r", [1, 2, 3], greedy_params(5), [], Answer().take)
        return next(iter(client.capacity().lost.values()))
    finally:
        client.close()


def send_raw(url: str, count: int) -> int:
    """Send blocks of random bytes, which are not ZMTP, over one connection after another. Return
    the number of blocks, including blocks that the engine refuses.
    """
    host, port = url.removeprefix("tcp://").split(":")
    taken = 0
    while taken < count:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            try:
                for _ in range(100):
                    raw.sendall(os.urandom(64))
                    taken += 1
            except OSError:  # the engine has closed the connection, which is right
                taken += 1
    return taken


def send_frames(endpoint: Endpoint, kind: int, count: int) -> None:
    """Try to send ``count`` frames that are no valid messages, over a socket of type ``kind``."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = own.socket(kind)
    endpoint.connect(peer)
    for i in range(count):
        try:
            peer.send(b"\x81\xa4type\xa4\xff\xfe%d" % i, zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)  # the queue of a peer without valid keys is full
    own.destroy(linger=0)
