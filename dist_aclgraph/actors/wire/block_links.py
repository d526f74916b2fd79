"""SourceLinks: connections to the nodes of a group, for one fetch of files of KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import zmq

from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.block_server import WINDOW, FileKind, ReadFile
from dist_aclgraph.actors.wire.context import Context
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES, read_frame
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.kv.checkpoints import BlockHash

_numbers = msgspec.msgpack.Decoder(int)


class FileKey(NamedTuple):
    """Identifies a file by the index of its block in the names of a fetch, and by its place."""

    position: int
    place: int


class SourceError(Exception):
    """A node of a source has sent no file in time, or has sent an invalid answer.

    Attributes:
        url: the address of this node.
    """

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(cause)
        self.url = url


class SourceLinks:
    """Owns a connection to each node of a source from which files are read.

    Args:
        endpoints: for each kind of files, the node of each place. None stands for this node itself,
            from which nothing can be fetched.
        silence_s: a node that sends no file for this time counts as silent.
    """

    def __init__(
        self,
        context: Context,
        endpoints: Mapping[FileKind, Mapping[int, Endpoint | None]],
        token: str,
        silence_s: float,
    ) -> None:
        self._context = context
        self._endpoints = endpoints
        self._token = token
        self._silence_s = silence_s
        self._links: dict[str, _Link] = {}

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def read_all(
        self, kind: FileKind, names: Sequence[BlockHash], keys: Iterable[FileKey]
    ) -> Iterator[tuple[FileKey, memoryview]]:
        """Yield the files in order; a missing file is empty.

        At most ``WINDOW`` requests wait for answers at the same time.

        Raises:
            SourceError: a node refuses the connection, no file has arrived in time, or an answer is
                not valid.
        """
        asked: list[tuple[FileKey, _Link | None, int]] = []
        for key in keys:
            link, number = self._link_to(self._endpoints[kind][key.place]), 0
            if link is not None:
                number = link.ask(self._token, kind, key.place, names[key.position])
            asked.append((key, link, number))
            if len(asked) == WINDOW:
                yield self._receive(*asked.pop(0))
        for each in asked:
            yield self._receive(*each)

    def _link_to(self, endpoint: Endpoint | None) -> _Link | None:
        if endpoint is None:
            return None
        link = self._links.get(endpoint.url)
        if link is None:
            link = self._links[endpoint.url] = _Link(self._context, endpoint)
        return link

    def _receive(self, key: FileKey, link: _Link | None, number: int) -> tuple[FileKey, memoryview]:
        return key, memoryview(b"") if link is None else link.receive(number, self._silence_s)


class _Link:
    """A connection to one node of a source."""

    def __init__(self, context: Context, endpoint: Endpoint) -> None:
        self._url = endpoint.url
        self._next = 0  # number of the next request
        self._last = -1  # number of the last answer
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        endpoint.connect(self._socket)

    def close(self) -> None:
        self._socket.close()

    def ask(self, token: str, kind: FileKind, place: int, name: BlockHash) -> int:
        """Request a file; return the number of the request."""
        number, self._next = self._next, self._next + 1
        request = ReadFile(token, number, kind, place, name)
        try:
            self._socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
        except zmq.Again:  # the queue cannot be full, so the handshake has failed
            raise SourceError(self._url, "the source refuses the connection") from None
        return number

    def receive(self, number: int, silence_s: float) -> memoryview:
        """Return the file that was requested with this number; empty if there is no file."""
        frame = memoryview(b"")
        while self._last < number:  # drops the answers for files that are not needed any longer
            if not self._socket.poll(int(silence_s * 1000)):
                raise SourceError(self._url, f"no file has arrived within {silence_s:g} s")
            # Read without a copy, because a copy of many bytes would hold Python's global lock.
            first, *rest = self._socket.recv_multipart(copy=False)
            try:
                found = read_frame(_numbers, first.bytes)
            except NotAMessageError as e:
                raise SourceError(self._url, str(e)) from None
            if not self._last < found <= number or len(rest) != 1:
                raise SourceError(self._url, "the frames are no answer to a request")
            self._last = found
            frame = memoryview(rest[0].buffer)
        return frame
