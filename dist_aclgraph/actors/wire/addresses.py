"""Decides at which addresses the sockets of channels listen. All channels follow the same rule.

Peers on the engine's node connect to a socket file in a directory that only this user may enter.
Peers on other nodes connect over TCP with CURVE keys, which they receive through Ray. The engine
listens at its node's own address, never at a wildcard, and accepts only peers with the channel's
client key.
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

from dist_aclgraph.actors.wire.context import Context
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES
from dist_aclgraph.errors import PlacementError

T = TypeVar("T")

HANDSHAKE_MS = 10_000  # milliseconds until a connection without valid keys is closed
MAX_WAITING_CONNECTIONS = 64
# The pause between two attempts to find a free port, in seconds. The pause grows from FIRST_DELAY_S
# to MOST_DELAY_S.
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 5.0
REMEDY = "start Ray there with its own --node-ip-address"
DOMAIN = "dist_aclgraph"  # the domain in which the authenticator checks client keys


@dataclass(frozen=True)
class PeerKeys:
    """The CURVE keys, in Z85, with which a peer connects over TCP."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Endpoint:
    """A socket's ZeroMQ address; for TCP also the keys of the channel."""

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
    """The addresses at which peers reach a socket of an engine.

    Attributes:
        node_id: Ray's id of the engine's node.
        file: endpoint for peers on the engine's node.
        tcp: endpoint for peers on other nodes; None if the engine expects no such peers.
    """

    node_id: str
    file: Endpoint
    tcp: Endpoint | None = None

    def seen_from(self, node_id: str) -> Endpoint:
        """Return the endpoint for a peer on a node.

        Raises:
            PlacementError: the peer is on another node, but the engine expects peers on its own
                node only.
        """
        if node_id == self.node_id:
            return self.file
        if self.tcp is None:
            raise reached_here_alone(self.node_id, node_id)
        return self.tcp


class Reach(msgspec.Struct, frozen=True):
    """The addresses at which clients reach a deployment now, and other facts that clients need.

    Attributes:
        addresses: addresses of the engines of all groups.
        token: the secret that a client must send to be accepted.
        max_model_len: maximum length of a client's request, in tokens.
        node_id: Ray's id of the node of the process that owns the deployment.
    """

    addresses: list[Address]
    token: str
    max_model_len: int
    node_id: str


def reached_here_alone(engines: str, other: str) -> PlacementError:
    """Return the error for a peer on another node. The engine expects peers on its node only."""
    return PlacementError(
        f"the engine on node {engines[:8]} is reached on its node alone, and this is "
        f"node {other[:8]}, which came later; start the deployment again"
    )


@dataclass(frozen=True)
class Place:
    """The directory, the address and the ports at which an engine's sockets listen.

    Attributes:
        node_id: Ray's id of the engine's node.
        directory: directory of the socket files.
        host: the node's own address, for peers on other nodes; None if there are no peers on other
            nodes.
        ports: the ports to choose from; None for any free port.
        remedy: text for an error message: what the user must change if this machine does not have
            the address ``host``.
    """

    node_id: str
    directory: str
    host: str | None = None
    ports: range | None = None
    remedy: str = REMEDY


class Listener:
    """Binds the sockets of one channel. All these sockets use one server key pair, and accept one
    client key pair.

    Owns the thread that checks the keys of connecting peers.

    Args:
        other_client: a second public client key that is accepted, in Z85; None if only the
            channel's client key is accepted.
    """

    def __init__(self, context: Context, place: Place, other_client: bytes | None = None) -> None:
        self._place = place
        self._server_public, self._server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._keys = PeerKeys(self._server_public, client_public, client_secret)
        self._clients = {client_public, other_client}
        self._authenticator: ThreadAuthenticator | None = None
        if place.host is not None:
            # CURVE proves only that a client has a key pair. The authenticator checks that the
            # client's key is the channel's client key.
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.configure_curve_callback(DOMAIN, self)
            self._authenticator.start()

    def callback(self, domain: str, client_key: bytes) -> bool:
        """Return whether a client with this key may connect. Called by the authenticator."""
        return client_key in self._clients

    def bind(
        self, owned: zmq.Socket[bytes], name: str, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> Address:
        """Let a socket listen. Return the socket's address.

        Args:
            name: name of the socket file.
            max_bytes: maximum length of a frame. If a peer announces a longer frame, its connection
                is closed.

        Raises:
            PlacementError: none of the ports is free.
        """
        place = self._place
        owned.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        owned.setsockopt(zmq.BACKLOG, MAX_WAITING_CONNECTIONS)
        owned.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        file = f"ipc://{place.directory}/{name}"
        owned.bind(file)
        if place.host is None:
            return Address(place.node_id, Endpoint(file))
        # Socket options apply only to addresses that are bound later. At this point, only the
        # socket file is bound. So these options apply only to TCP.
        owned.curve_server = True
        # Without this option, any key would be accepted while the authenticator does not run.
        owned.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        owned.zap_domain = DOMAIN.encode()
        owned.curve_publickey = self._server_public
        owned.curve_secretkey = self._server_secret
        owned.setsockopt(zmq.IPV6, int(":" in place.host))
        host = url_host(place.host)
        bind_to_one(
            place.ports,
            place.host,
            lambda port: owned.bind(f"tcp://{host}:{port}"),
            remedy=place.remedy,
        )
        url = owned.getsockopt_string(zmq.LAST_ENDPOINT)
        return Address(place.node_id, Endpoint(file), Endpoint(url, self._keys))

    def close(self) -> None:
        """Stop checking keys. Call this before the context is terminated."""
        if self._authenticator is not None:
            self._authenticator.stop()


def open_meeting(host: str, ports: range | None, timeout_s: float) -> socket.socket:
    """Return a socket that listens at ``host``. The ranks of a group connect to this socket to form
    the HCCL groups.

    If all ports are in use, one of them may soon become free. So this function tries all ports
    again and again, until ``timeout_s`` has passed.

    Raises:
        PlacementError: no port became free.
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


def bind_to_one(
    ports: range | None,
    host: str,
    bind: Callable[[int], object],
    keys: str = "cluster.ports, of which each lockstep group takes up to five",
    remedy: str = REMEDY,
) -> None:
    """Call ``bind`` with one port after another until a port is free. Port 0 means any free port.

    Args:
        keys: the names of the configuration keys that define the ports, for the error message.
        remedy: what the user must change if this machine does not have the address, for the error
            message.

    Raises:
        PlacementError: no port is free.
    """
    for port in ports if ports is not None else (0,):
        try:
            bind(port)
            return
        except (OSError, zmq.ZMQError) as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise PlacementError(f"{host} is no address of this machine; {remedy}") from None
            if e.errno != errno.EADDRINUSE:
                raise
    range_ = f"{ports[0]}-{ports[-1]}" if ports else "the ephemeral range"
    raise PlacementError(
        f"no port of {range_} is free on {host}; widen {keys}, or end the programs "
        "that listen there"
    )


def url_host(host: str) -> str:
    """Return ``host`` in the form that a URL needs: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host
