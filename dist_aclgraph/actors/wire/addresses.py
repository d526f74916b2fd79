"""Where channels listen: one rule for all of them.

Peers on the engine's node connect to a socket file, in a directory that only this user may enter.
Peers on other nodes connect over TCP with CURVE keys, which Ray hands over: the engine listens at
its node's own address, never at a wildcard, and accepts only peers with the channel's client key.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES
from dist_aclgraph.errors import PlacementError

T = TypeVar("T")

HANDSHAKE_MS = 10_000  # a connection that has not shown its keys by then is closed
MAX_WAITING_CONNECTIONS = 64
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 5.0  # until ports that are all taken are tried again
DOMAIN = "dist_aclgraph"  # in which the authenticator asks us


@dataclass(frozen=True)
class PeerKeys:
    """The CURVE keys by which a peer connects over TCP, in Z85."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Endpoint:
    """ZeroMQ's address of a socket, and the keys of the channel if it is TCP."""

    url: str
    keys: PeerKeys | None = None

    def connect(self, peer: zmq.Socket[bytes]) -> None:
        if self.keys is not None:
            peer.curve_serverkey = self.keys.server_public
            peer.curve_publickey = self.keys.client_public
            peer.curve_secretkey = self.keys.client_secret
        peer.setsockopt(zmq.IPV6, int("[" in self.url))
        peer.connect(self.url)


@dataclass(frozen=True)
class Address:
    """Where a socket of an engine is reached.

    Attributes:
        node_id: the engine's node, as Ray calls it.
        file: for peers on that node.
        tcp: for peers on others; None where the engine expects none.
    """

    node_id: str
    file: Endpoint
    tcp: Endpoint | None = None

    def seen_from(self, node_id: str) -> Endpoint:
        """Return the endpoint for a peer on a node.

        Raises:
            PlacementError: the engine expects peers on its own node only.
        """
        if node_id == self.node_id:
            return self.file
        if self.tcp is None:
            raise reached_here_alone(self.node_id, node_id)
        return self.tcp


class Reach(msgspec.Struct, frozen=True):
    """Where a deployment is reached now, and what its clients must know.

    Attributes:
        addresses: of the engines of all groups.
        token: the secret that clients send to be let in.
        max_model_len: the longest request that clients may send.
        node_id: the node of the deployment's owner, as Ray calls it.
    """

    addresses: list[Address]
    token: str
    max_model_len: int
    node_id: str


def reached_here_alone(engines: str, other: str) -> PlacementError:
    """Return the error for a peer on another node than the engine's, where none was expected."""
    return PlacementError(
        f"the engine on node {engines[:8]} is reached on its node alone, and this is "
        f"node {other[:8]}, which came later; start the deployment again"
    )


@dataclass(frozen=True)
class Place:
    """Where the sockets of an engine listen.

    Attributes:
        node_id: the engine's node, as Ray calls it.
        directory: of socket files.
        host: the node's own address, for peers on other nodes; None where there are none.
        ports: to choose from; None is any that is free.
    """

    node_id: str
    directory: str
    host: str | None = None
    ports: range | None = None


class Listener:
    """Binds the sockets of one channel, which have one pair of keys for each end.

    Owns the thread that checks the keys of connecting peers.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], place: Place) -> None:
        self._place = place
        self._server_public, self._server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._keys = PeerKeys(self._server_public, client_public, client_secret)
        self._authenticator: ThreadAuthenticator | None = None
        if place.host is not None:
            # CURVE alone proves that a client has some key: this one asks whether it is the right.
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.configure_curve_callback(DOMAIN, self)
            self._authenticator.start()

    def callback(self, domain: str, client_key: bytes) -> bool:
        """Say whether a client may come in; the authenticator asks."""
        return client_key == self._keys.client_public

    def bind(self, owned: zmq.Socket[bytes], name: str) -> Address:
        """Have a socket listen, and return where.

        Args:
            name: of its socket file.

        Raises:
            PlacementError: none of the ports is free.
        """
        place = self._place
        owned.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        owned.setsockopt(zmq.BACKLOG, MAX_WAITING_CONNECTIONS)
        owned.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        file = f"ipc://{place.directory}/{name}"
        owned.bind(file)
        if place.host is None:
            return Address(place.node_id, Endpoint(file))
        # Only for TCP: options hold for addresses that are bound after them.
        owned.curve_server = True
        # Without this, any key is accepted while the authenticator does not run.
        owned.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        owned.zap_domain = DOMAIN.encode()
        owned.curve_publickey = self._server_public
        owned.curve_secretkey = self._server_secret
        owned.setsockopt(zmq.IPV6, int(":" in place.host))
        host = url_host(place.host)
        bind_to_one(place.ports, place.host, lambda port: owned.bind(f"tcp://{host}:{port}"))
        url = owned.getsockopt_string(zmq.LAST_ENDPOINT)
        return Address(place.node_id, Endpoint(file), Endpoint(url, self._keys))

    def close(self) -> None:
        """Stop checking keys; to be called before the context ends."""
        if self._authenticator is not None:
            self._authenticator.stop()


def open_meeting(host: str, ports: range | None, timeout_s: float) -> socket.socket:
    """Return a socket that listens at ``host``, for the ranks of a group to meet.

    Ports that are all taken may be free again a moment later: they are tried until the time is up.

    Raises:
        PlacementError: none became free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end_s, delay_s = time.monotonic() + timeout_s, FIRST_DELAY_S
    while True:
        opened = socket.socket(family)
        try:
            bind_to_one(ports, host, lambda port, s=opened: s.bind((host, port)))  # type: ignore[misc]
            opened.listen()
            return opened
        except PlacementError:
            opened.close()
            if time.monotonic() + delay_s > end_s:
                raise
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, MOST_DELAY_S)


def bind_to_one(ports: range | None, host: str, bind: Callable[[int], object]) -> None:
    """Call ``bind`` with one port after the other, until one is free; port 0 means any.

    Raises:
        PlacementError: no port is free.
    """
    for port in ports if ports is not None else (0,):
        try:
            bind(port)
            return
        except (OSError, zmq.ZMQError) as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise PlacementError(
                    f"{host} is no address of this machine; start Ray there with its own "
                    "--node-ip-address"
                ) from None
            if e.errno != errno.EADDRINUSE:
                raise
    range_ = f"{ports[0]}-{ports[-1]}" if ports else "the ephemeral range"
    raise PlacementError(
        f"no port of {range_} is free on {host}; widen cluster.ports, of which each lockstep group "
        "takes up to four, or end what else listens there"
    )


def url_host(host: str) -> str:
    """Return an address in the form for a URL."""
    return f"[{host}]" if ":" in host else host
