"""PeersKey: the keys with which services fetch files of KV blocks from each other's nodes.

Services that do not run in the same Ray cannot send each other keys or tokens. Instead, they have a
common secret, the file ``kv.peers_key_file``. Each service derives two things from this secret:

- the CURVE key pair and the token with which a service fetches files from another service;
- the key that signs tickets. A ticket contains the addresses of the servers from which files can be
  fetched, and the servers' public CURVE keys. A ticket contains no secret, because clients of the
  API can read it.

A service connects only to addresses in tickets with a valid signature. So a client of the API
cannot choose the address to which a service connects, and cannot send KV to a service.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
from zmq.utils import z85

from dist_aclgraph.actors.wire.addresses import Address, Endpoint, PeerKeys, Place
from dist_aclgraph.actors.wire.block_server import BlockServer, BlockSource, FileKind
from dist_aclgraph.actors.wire.lent_files import LentFiles
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.key_files import read_key_file
from dist_aclgraph.kv.group_files import Holders
from dist_aclgraph.kv.tiers import CachePlace, KVTiers

FILE_KEY = "kv.peers_key_file"
MIN_KEY_CHARS = 32
MAX_FILE_BYTES = 4096
# Seconds until a ticket expires. The clocks of two services must differ by less than this time.
TICKET_S = 600.0
MAX_TICKET_CHARS = 1 << 16
_MAC_BYTES = 32


class TicketError(Exception):
    """A ticket cannot be used. The message says why, but quotes nothing from the ticket."""


class Offer(NamedTuple):
    """The address at which another service can fetch files, and the ticket that allows the fetch.

    Attributes:
        host: address of the first node's server.
        port: port of the first node's server.
    """

    host: str
    port: int
    ticket: str


class _Node(msgspec.Struct, frozen=True, array_like=True):
    url: str
    server_public: bytes


class _Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The signed part of a ticket; see ``BlockSource``.

    Attributes:
        expires_s: the Unix time at which the ticket expires.
    """

    expires_s: float
    nodes: tuple[_Node, ...]
    identity: str
    place: CachePlace
    holders: tuple[Holders, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the ticket names a node for each part of the cache. ``routes`` requires these
        nodes. A ticket from another version of dist_aclgraph may lack some nodes.
        """
        counts = len(self.place.all_places), len(self.place.all_state_places)
        return bool(self.nodes) and all(
            (len(each.blocks), len(each.states)) == counts
            and all(each.blocks + each.states)
            and all(0 <= i < len(self.nodes) for part in each.blocks + each.states for i in part)
            for each in self.holders
        )


class PeersKey:
    """The keys that are derived from the common secret of several services.

    Attributes:
        client_public: the public CURVE key, in Z85, of services that fetch files.
        token: the token that these services send in their requests.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._client_secret = z85.encode(self._derive("curve"))
        self.client_public = zmq.curve_public(self._client_secret)
        self.token = self._derive("token").hex()

    @classmethod
    def read(cls, config: Config) -> PeersKey | None:
        """Return the keys from the file that the configuration names; None if it names no file.

        Raises:
            ConfigError: the file cannot be used.
        """
        path = config.kv.peers_key_file
        if path is None:
            return None
        secret = read_key_file(FILE_KEY, Path(path), MAX_FILE_BYTES).strip()
        if len(secret) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{FILE_KEY} {path} has a key of {len(secret)} characters; the key needs at least "
                f"{MIN_KEY_CHARS}, as of: openssl rand -hex 32"
            )
        return cls(secret)

    def _derive(self, purpose: str) -> bytes:
        """Return a key of 32 bytes that is used for one purpose only."""
        return hmac.digest(self._secret, f"dist_aclgraph kv peers {purpose}".encode(), "sha256")

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._derive("ticket"), body, "sha256")

    def offer(self, source: BlockSource, now_s: float) -> Offer | None:
        """Return the offer with which another service can fetch the files of a group; None if the
        group has too many nodes for a ticket, or does not listen on TCP.

        Args:
            now_s: the present Unix time.
        """
        ends = [each.tcp for each in source.addresses]
        nodes = tuple(
            _Node(end.url, end.keys.server_public)
            for end in ends
            if end is not None and end.keys is not None
        )
        if not ends or len(nodes) < len(ends):
            return None
        body = msgspec.msgpack.encode(
            _Ticket(now_s + TICKET_S, nodes, source.identity, source.place, source.holders)
        )
        ticket = base64.urlsafe_b64encode(self._mac(body) + body).decode()
        if len(ticket) > MAX_TICKET_CHARS:
            return None
        return Offer(*_host_and_port(nodes[0].url), ticket)

    def open(self, offer: Offer, now_s: float) -> BlockSource:
        """Return the source that a ticket names.

        Args:
            now_s: the present Unix time.

        Raises:
            TicketError: the ticket is not signed with this key, has expired, or does not belong to
                the host and the port.
        """
        if len(offer.ticket) > MAX_TICKET_CHARS:
            raise TicketError(f"it has more than {MAX_TICKET_CHARS} characters")
        try:
            found = base64.b64decode(offer.ticket.encode(), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise TicketError("it is not in Base64") from None
        mac, body = found[:_MAC_BYTES], found[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise TicketError(f"it is not signed with the key of {FILE_KEY}") from None
        try:
            ticket = msgspec.msgpack.decode(body, type=_Ticket)
        except msgspec.MsgspecError:
            ticket = None
        if ticket is None or not ticket.is_complete:
            raise TicketError("it was made by another version of dist_aclgraph")
        if now_s >= ticket.expires_s:
            raise TicketError(f"it expired {now_s - ticket.expires_s:.0f} s ago")
        if (offer.host, offer.port) != _host_and_port(ticket.nodes[0].url):
            raise TicketError("remote_host and remote_port are not those of the ticket")
        # Each node gets a new name instead of Ray's id. A group fetches nothing from a node with
        # the id of its own node, because groups of one service share their files on a node. But
        # different services may keep different files.
        addresses = tuple(self._address(f"peer-{i}", node) for i, node in enumerate(ticket.nodes))
        return BlockSource(addresses, ticket.identity, ticket.place, ticket.holders, self.token)

    def _address(self, node_id: str, node: _Node) -> Address:
        keys = PeerKeys(node.server_public, self.client_public, self._client_secret)
        return Address(node_id, Endpoint(""), Endpoint(node.url, keys))


def open_server(
    config: Config,
    at: Place,
    token: str,
    files: Mapping[FileKind, Sequence[KVTiers]],
    lent: LentFiles | None = None,
) -> BlockServer:
    """Return a server of files. If the configuration names a key file, the server also answers
    requests of other services. For the arguments, see ``BlockServer``.

    Raises:
        ConfigError: the file with the key cannot be used.
        PlacementError: no port is free.
    """
    key = PeersKey.read(config)
    if key is None:
        return BlockServer(at, token, files, lent)
    return BlockServer(at, token, files, lent, key.token, key.client_public)


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
