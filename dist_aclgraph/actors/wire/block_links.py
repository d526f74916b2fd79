"""SourceLinks: connections to the nodes of a group, for one fetch of files of KV blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import zmq

from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.block_server import (
    MAX_FILE_BYTES,
    WINDOW,
    EndReads,
    FileKind,
    ReadFile,
)
from dist_aclgraph.actors.wire.context import Context
from dist_aclgraph.actors.wire.lent_files import LentFile, MemoryReader, ReadError
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES, read_frame
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.kv.checkpoints import BlockHash

_numbers = msgspec.msgpack.Decoder(int)
_lent_files = msgspec.msgpack.Decoder(LentFile)
LINGER_MS = 1000  # time limit in milliseconds for the unsent messages of a closed connection


class FileKey(NamedTuple):
    """Identifies a file in a fetch. ``position`` is the index of the block in the fetch's list of
    names. ``place`` is the index of the part of the block that the file contains.
    """

    position: int
    place: int


class SourceError(Exception):
    """A node of a source has sent no file in time, or has sent an invalid answer.

    Attributes:
        url: the address of the node that failed.
    """

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(cause)
        self.url = url


class SourceLinks:
    """Owns a connection to each node from which files of a source are read.

    Args:
        endpoints: for each kind of file and each part of the cache, the node that has the files.
            None stands for this node itself, from which nothing can be fetched.
        silence_s: a node that sends no file for this number of seconds counts as silent.
        reader: reads files in the memory of other nodes; None if the other nodes send the files in
            messages.
    """

    def __init__(
        self,
        context: Context,
        endpoints: Mapping[FileKind, Mapping[int, Endpoint | None]],
        token: str,
        silence_s: float,
        reader: MemoryReader | None = None,
    ) -> None:
        self._context = context
        self._reader = reader
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
        """Yield the files in the order of ``keys``. If a file is missing, its bytes are empty. The
        bytes of a file are valid until the next file is taken from this iterator.

        At most ``WINDOW`` requests wait for answers at the same time.

        Raises:
            SourceError: a node refuses the connection, no file has arrived in time, or an answer is
                not valid.
        """
        asked: list[tuple[FileKey, _Link | None, int]] = []
        for key in keys:
            link, number = self._link_to(self._endpoints[kind][key.place]), 0
            if link is not None:
                number = link.ask(kind, key.place, names[key.position])
            asked.append((key, link, number))
            if len(asked) == WINDOW:
                yield from self._receive(*asked.pop(0))
        for each in asked:
            yield from self._receive(*each)

    def _link_to(self, endpoint: Endpoint | None) -> _Link | None:
        if endpoint is None:
            return None
        link = self._links.get(endpoint.url)
        if link is None:
            link = _Link(self._context, endpoint, self._token, self._reader)
            self._links[endpoint.url] = link
        return link

    def _receive(
        self, key: FileKey, link: _Link | None, number: int
    ) -> Iterator[tuple[FileKey, memoryview]]:
        if link is None:
            yield key, memoryview(b"")
            return
        for file in link.receive(number, self._silence_s):
            yield key, file


class _Link:
    """A connection to one node of a source."""

    def __init__(
        self, context: Context, endpoint: Endpoint, token: str, reader: MemoryReader | None
    ) -> None:
        self._url = endpoint.url
        self._token = token
        self._reader = reader
        self._next = 0  # number of the next request
        self._last = -1  # number of the last answer
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        endpoint.connect(self._socket)

    def close(self) -> None:
        if self._reader is None:
            self._socket.close()
        else:
            with contextlib.suppress(SourceError):
                self._end_reads(self._next - 1)
            self._socket.close(LINGER_MS)

    def ask(self, kind: FileKind, place: int, name: BlockHash) -> int:
        """Request a file. Return the number of this request."""
        number, self._next = self._next, self._next + 1
        engine = "" if self._reader is None else self._reader.engine
        self._send(ReadFile(self._token, number, kind, place, name, engine))
        return number

    def _end_reads(self, number: int) -> None:
        self._send(EndReads(self._token, number))

    def _send(self, message: ReadFile | EndReads) -> None:
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the queue cannot be full, so the handshake has failed
            raise SourceError(self._url, "the source refuses the connection") from None

    def receive(self, number: int, silence_s: float) -> Iterator[memoryview]:
        """Yield the file that the request with this number asked for; empty bytes if there is no
        such file.
        """
        frames: list[memoryview] = []
        while self._last < number:  # drops the answers to earlier requests
            if not self._socket.poll(int(silence_s * 1000)):
                raise SourceError(self._url, f"no file has arrived within {silence_s:g} s")
            # The frames are not copied. A copy of many bytes would block all Python threads for a
            # long time.
            first, *rest = self._socket.recv_multipart(copy=False)
            try:
                found = read_frame(_numbers, first.bytes)
            except NotAMessageError as e:
                raise SourceError(self._url, str(e)) from None
            most = 1 if self._reader is None else 2
            if not (self._last < found <= number and 1 <= len(rest) <= most):
                raise SourceError(self._url, "the frames are no answer to a request")
            self._last = found
            frames = [memoryview(each.buffer) for each in rest]
        if len(frames) == 1:
            yield frames[0]
            return
        try:
            yield from self._read(frames[1])
        finally:
            self._end_reads(number)

    def _read(self, frame: memoryview) -> Iterator[memoryview]:
        """Read a file from the memory of the source's node, and yield it. ``frame`` contains the
        file's address.
        """
        assert self._reader is not None
        try:
            lent = read_frame(_lent_files, bytes(frame))
            if not 0 < lent.num_bytes <= MAX_FILE_BYTES:
                raise ReadError(f"the source lends {lent.num_bytes} bytes")
            with self._reader.read(lent) as file:
                yield file
        except (NotAMessageError, ReadError) as e:
            raise SourceError(self._url, str(e)) from None
