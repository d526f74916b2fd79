"""BlockServer: sends files of KV blocks to groups on other nodes.

In a deployment with prefill groups, each group runs this server on each of its nodes. On the
engine's node, the engine runs the server. On each other node, a worker runs the server. Each
request identifies one file by a block's hash and a part of the block, never by a path. Each answer
contains one whole file, or no file. The server can only read files.

With ``kv.transport: hixl``, workers run all servers. An answer then contains the address of the
file in the worker's memory. The reader reads the file at this address.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple

import msgspec
import zmq

from dist_aclgraph.actors.wire.addresses import Address, Listener, Place
from dist_aclgraph.actors.wire.context import make_context
from dist_aclgraph.actors.wire.lent_files import LentFiles
from dist_aclgraph.actors.wire.sockets import (
    MAX_MESSAGE_BYTES,
    Wakeup,
    has_message,
    read_frame,
)
from dist_aclgraph.config import Config
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.kv.group_files import GroupFiles, Holders
from dist_aclgraph.kv.tiers import CachePlace, KVTiers

WINDOW = 4  # maximum number of unanswered requests of one fetch
# Maximum number of unread frames of one peer. Further frames are dropped. An answer has at most
# three frames. So a peer with at most WINDOW unanswered requests loses no frame.
MAX_QUEUED_FRAMES = 3 * WINDOW
MAX_REQUEST_BYTES = 1024
MAX_FILE_BYTES = MAX_MESSAGE_BYTES - 1024  # because encryption adds some bytes
# Milliseconds between two checks for free slots while requests wait. The slots of a dead reader
# become free without a message.
RETRY_MS = 1000
QUIET_S = 1.0  # after this time without a request, all fetches from the server have ended

logger = logging.getLogger(__name__)

FileKind = Literal["block", "state"]


class BlockSource(msgspec.Struct, frozen=True):
    """The servers from which other groups can fetch the files of a group's blocks.

    Attributes:
        addresses: the address of the server on each node of the group; see ``GroupFiles.nodes``.
        identity: result of ``cache_identity`` in the group. Only groups with the same identity can
            use the files.
        place: the part of the KV cache that the group's first worker stores.
        holders: the nodes that have the files; see ``GroupFiles.holders``.
        token: the token that requests must contain; "" stands for the deployment's token.
    """

    addresses: tuple[Address, ...]
    identity: str
    place: CachePlace
    holders: tuple[Holders, ...]
    token: str = ""


class NodeServer(NamedTuple):
    """A server on one node of a group.

    Attributes:
        identity: result of ``cache_identity`` on this node.
    """

    address: Address
    identity: str


def source_of(servers: Sequence[NodeServer], files: GroupFiles) -> BlockSource | None:
    """Return the source from which other groups fetch a group's files. Return None if the nodes of
    the group have different files of the model. KV that was computed with other weights must not be
    used.

    Args:
        servers: the server on each node of the group, in the order of ``files.nodes``.
    """
    addresses, identities = zip(*servers, strict=True)
    if len(set(identities)) > 1:
        logger.warning(
            "no other group fetches KV blocks from this group: its nodes have different files of "
            "the model (names, sizes, times)"
        )
        return None
    return BlockSource(addresses, identities[0], files.places[0], files.holders)


class ReadFile(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Asks for a file. The first frame of the answer is the request's number, and the second frame
    is the file. The second frame is empty if there is no such file, or if the file is larger than
    ``MAX_FILE_BYTES``. If the reader can read the server's memory, the second frame is empty, and a
    third frame contains the address of the file (``LentFile``).

    Attributes:
        token: the deployment's token, or the token for other services.
        place: index of the part of the cache that the file contains; an index in
            ``tiers_of(...)[kind]``.
        name: hash of the block.
        reader: name of the reader's HIXL engine if it can read the server's memory; else "".
    """

    token: str
    number: int
    kind: FileKind
    place: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    reader: str = ""


class EndReads(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Says that the reader has finished its requests with numbers up to ``number``. The server can
    then free the slots of the requested files. The server does not answer this message.
    """

    token: str
    number: int


_decoder = msgspec.msgpack.Decoder(ReadFile | EndReads)


def tiers_of(
    config: Config, place: CachePlace, identity: str = ""
) -> dict[FileKind, list[KVTiers]]:
    """Return the folders for the files of all workers of a data-parallel rank. ``place`` is the
    part of the cache of any one of these workers. The order of the folders does not depend on the
    choice of this worker.

    Args:
        identity: name of the caches' contents; see ``KVTiers.open``.

    Raises:
        ConfigError: a folder cannot be created, or is too small.
    """
    states = (KVTiers.open_states(config, each, identity) for each in place.all_state_places)
    return {
        "block": [KVTiers.open(config, each, identity) for each in place.all_places],
        "state": [each for each in states if each is not None],
    }


class BlockServer:
    """Owns a socket, and the thread that answers requests.

    Args:
        at: the address and ports at which the socket listens.
        token: the deployment's token, which each request must contain.
        files: the files that can be requested; see ``tiers_of``.
        lent: copies files into memory that readers can read; None if answers contain the files.
        peer_token: the token of other services; None if they may not fetch files.
        peer_key: the public CURVE key of other services, in Z85; None if they may not connect.

    Attributes:
        address: the address to which other groups connect.

    Raises:
        PlacementError: no port is free.
    """

    def __init__(
        self,
        at: Place,
        token: str,
        files: Mapping[FileKind, Sequence[KVTiers]],
        lent: LentFiles | None = None,
        peer_token: str | None = None,
        peer_key: bytes | None = None,
    ) -> None:
        self._tokens = [each.encode() for each in (token, peer_token) if each is not None]
        self._files = files
        self._lent = lent
        self._context = make_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        self._listener = Listener(self._context, at, peer_key)
        self.address = self._listener.bind(self._socket, "blocks", MAX_REQUEST_BYTES)
        self._wakeup = Wakeup()
        self._is_closing = False
        self._was_asked = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        lent = self._lent
        while not self._is_closing:
            poller.poll(RETRY_MS if lent is not None and lent.has_waiting else None)
            while not self._is_closing and has_message(self._socket):
                self._answer(self._socket.recv_multipart())
            if lent is not None:
                self._answer_lent(lent)

    def _answer(self, frames: list[bytes]) -> None:
        """Answer a request. A request that is invalid or has a wrong token gets no answer."""
        peer, *requests = frames
        try:
            request = read_frame(_decoder, b"".join(requests))
        except NotAMessageError:
            return
        given = request.token.encode()
        if not any(secrets.compare_digest(given, token) for token in self._tokens):
            return
        self._was_asked.set()
        if isinstance(request, EndReads):
            if self._lent is not None:
                self._lent.end(peer, request.number)
            return
        places = self._files[request.kind]
        files = places[request.place] if request.place < len(places) else None
        if self._lent is None or not request.reader:
            file = b"" if files is None else files.file_bytes(request.name, MAX_FILE_BYTES)
            self._send(peer, request.number, file)
            return
        name = request.name
        open_file = None if files is None else partial(files.open_file, name, MAX_FILE_BYTES)
        self._lent.ask(peer, request.number, request.reader, open_file)
        self._answer_lent(self._lent)

    def _answer_lent(self, lent: LentFiles) -> None:
        for peer, number, file in lent.answers():
            self._send(peer, number, b"", *([] if file is None else [msgspec.msgpack.encode(file)]))

    def _send(self, peer: bytes, number: int, *frames: bytes) -> None:
        # The frames are not copied. A copy of many bytes would block all Python threads for a long
        # time.
        answer = (peer, msgspec.msgpack.encode(number), *frames)
        self._socket.send_multipart(answer, zmq.NOBLOCK, copy=False)

    @property
    def was_asked(self) -> bool:
        """Whether any peer has requested a file since the server's start."""
        return self._was_asked.is_set()

    def wait_until_quiet(self, timeout_s: float) -> None:
        """Wait until no peer has requested a file for ``QUIET_S``."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._was_asked.clear()
            if not self._was_asked.wait(min(QUIET_S, left_s)):
                return

    @property
    def is_closed(self) -> bool:
        """Whether the server's thread has ended."""
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Release the port. If the disk hangs, the thread and the port stay in use until the
        process ends.
        """
        self._is_closing = True
        self._wakeup.wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._socket.close(linger=0)
            self._listener.close()
            self._context.term()
            self._wakeup.close()
