"""Sends steps and results between an engine and the workers on its node, over one Unix socket for
each worker.

A frame consists of four bytes with the length, and the content. The kernel keeps all bytes in
order, wakes a peer that waits, and reports at once when the process of a peer has ended. The engine
accepts a worker only if the worker's process belongs to the engine's user, can enter the engine's
directory, and knows the token. Ray passes the token to the worker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES
from dist_aclgraph.errors import EngineDeadError, NotAMessageError

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16
MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES  # a worker that leaves more bytes unread is disconnected
MAX_WAITING_CONNECTIONS = 64
FAREWELL_S = 0.2  # seconds to wait until a slow worker has read the last frame
CREDENTIALS = struct.Struct("3i")  # the peer's process id, user id and group id


@dataclass(frozen=True)
class SocketFile:
    """The socket file to which workers on the engine's node connect, and a worker's first frame.

    A worker's first frame contains the token and the worker's data-parallel rank. Then the worker
    gets the frames for this rank.
    """

    path: str
    token: str = field(repr=False)
    dp_rank: int = 0

    @property
    def greeting(self) -> bytes:
        """The content of a worker's first frame."""
        return self.token.encode() + LENGTH.pack(self.dp_rank)


class FrameReader:
    """Splits the bytes of a connection into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes. Return the frames that are now complete.

        Raises:
            NotAMessageError: a frame is longer than MAX_MESSAGE_BYTES.
        """
        # Usually, the received bytes are exactly one frame. Such a frame is not added to the
        # buffer.
        if not self._received and 0 < self._end(data) == len(data):
            return [data[LENGTH.size :]]
        self._received += data
        found = []
        while 0 < (end := self._end(self._received)) <= len(self._received):
            found.append(bytes(self._received[LENGTH.size : end]))
            del self._received[:end]
        return found

    @staticmethod
    def _end(data: bytes | bytearray) -> int:
        """Return the size of the first frame, including its length field; 0 if this field is
        incomplete.
        """
        if len(data) < LENGTH.size:
            return 0
        (size,) = LENGTH.unpack_from(data)
        if size > MAX_MESSAGE_BYTES:
            raise NotAMessageError(f"a frame has {size} bytes, {MAX_MESSAGE_BYTES} are taken")
        return LENGTH.size + int(size)


class _Peer:
    """A connection at the engine. The peer counts as a worker after it has sent the token.

    Attributes:
        dp_rank: data-parallel rank of the worker; -1 before the peer has sent the token.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = FrameReader()
        self.unsent = bytearray()
        self.dp_rank = -1

    @property
    def is_worker(self) -> bool:
        return self.dp_rank >= 0


class LocalPeers:
    """The engine's side of the channel. Owns the socket file and all connections. Only one thread
    may use this object.

    Attributes:
        num_workers: number of workers that have connected so far.
        num_lost: number of workers whose connections have ended.

    Args:
        num_batches: number of data-parallel ranks of the group.
    """

    def __init__(self, path: str, num_batches: int = 1) -> None:
        self._num_batches = num_batches
        self.num_workers = 0
        self.num_lost = 0
        self.address = SocketFile(path, secrets.token_hex(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(MAX_WAITING_CONNECTIONS)
        self._listener.setblocking(False)
        self._peers: dict[int, _Peer] = {}  # the keys are file descriptors
        self._arrived: deque[bytes] = deque()
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def address_for(self, dp_rank: int) -> SocketFile:
        """Return the address to which the workers of a data-parallel rank connect."""
        return replace(self.address, dp_rank=dp_rank)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when ``wait`` has work to do."""
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait until connections or bytes arrive, and handle them. Return False after a timeout."""
        found = self._epoll.poll(timeout_s)
        for fd, events in found:
            peer = self._peers.get(fd)
            if peer is None:
                self._accept()
                continue
            if events & ~select.EPOLLOUT:
                self._read(peer)
            if events & select.EPOLLOUT and fd in self._peers:
                self._flush(peer)
        return bool(found)

    def poll_frame(self) -> bytes | None:
        """Return the next frame of any worker; None if there is none."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one frame to each worker. A worker that does not read does not delay the other
        workers.

        Args:
            frames: [num_batches], the frame of each data-parallel rank.
        """
        for peer in list(self._peers.values()):
            if peer.is_worker:
                frame = frames[peer.dp_rank]
                self._send(peer, LENGTH.pack(len(frame)) + frame)

    def close(self) -> None:
        """Send the unsent bytes, for at most ``FAREWELL_S`` seconds. Then end all connections."""
        for peer in list(self._peers.values()):
            if peer.unsent:
                peer.connection.settimeout(FAREWELL_S)
                with contextlib.suppress(OSError):
                    peer.connection.sendall(peer.unsent)
            peer.connection.close()
        self._peers.clear()
        self._epoll.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address.path)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the peer has disconnected already
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size
            )
            if CREDENTIALS.unpack(credentials)[1] != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            self._peers[connection.fileno()] = _Peer(connection)
            self._epoll.register(connection, select.EPOLLIN)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for frame in peer.frames.feed(data):
                if peer.is_worker:
                    self._arrived.append(frame)
                else:
                    peer.dp_rank = self._greeted(frame)
                    self.num_workers += 1
        except NotAMessageError:
            data = b""
        if not data:
            self._cut(peer)

    def _greeted(self, frame: bytes) -> int:
        """Return the data-parallel rank in a worker's first frame.

        Raises:
            NotAMessageError: the token is wrong, or the channel has no such data-parallel rank.
        """
        token, rank = frame[: -LENGTH.size], frame[-LENGTH.size :]
        if not secrets.compare_digest(token, self.address.token.encode()):
            raise NotAMessageError("not the channel's token")
        dp_rank = int(LENGTH.unpack(rank)[0])
        if dp_rank >= self._num_batches:
            raise NotAMessageError(f"{dp_rank} is none of {self._num_batches} data-parallel ranks")
        return dp_rank

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Send as many bytes as the connection accepts now; the other bytes are sent later."""
        sent = 0 if peer.unsent else self._sent(peer, data)
        if sent < len(data):
            if not peer.unsent:
                self._epoll.modify(peer.connection, select.EPOLLIN | select.EPOLLOUT)
            peer.unsent += data[sent:]
            if len(peer.unsent) > MAX_UNREAD_BYTES:
                self._cut(peer)

    def _flush(self, peer: _Peer) -> None:
        del peer.unsent[: self._sent(peer, peer.unsent)]
        if not peer.unsent:
            self._epoll.modify(peer.connection, select.EPOLLIN)

    @staticmethod
    def _sent(peer: _Peer, data: bytes | bytearray) -> int:
        """Send bytes, and return how many were sent. If the connection is closed, all bytes are
        dropped.
        """
        try:
            return peer.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # a later read returns the worker's last frames, then reports the error
            return len(data)

    def _cut(self, peer: _Peer) -> None:
        self.num_lost += peer.is_worker
        del self._peers[peer.connection.fileno()]
        self._epoll.unregister(peer.connection)
        peer.connection.close()


class LocalEngine:
    """A worker's side of the channel. Owns its connection. Only one thread may use this object."""

    def __init__(self, address: SocketFile) -> None:
        """Connect to the engine.

        Raises:
            EngineDeadError: no engine listens.
        """
        self._frames = FrameReader()
        self._arrived: deque[bytes] = deque()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.connect(address.path)
        except OSError as e:
            self._connection.close()
            raise EngineDeadError(f"the engine does not listen for its workers: {e}") from None
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self.send(address.greeting)

    def has_message(self) -> bool:
        """Return whether ``receive`` would return at once."""
        return bool(self._arrived or self._readable.poll(0))

    def receive(self) -> bytes:
        """Return the next frame.

        Raises:
            EngineDeadError: the engine's process has ended, or has sent invalid frames.
        """
        try:
            while not self._arrived:
                data = self._connection.recv(READ_BYTES)
                if not data:
                    raise EngineDeadError("the connection to the engine has ended")
                self._arrived += self._frames.feed(data)
        except (OSError, NotAMessageError) as e:
            raise EngineDeadError(f"the connection to the engine has failed: {e}") from None
        return self._arrived.popleft()

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            EngineDeadError: the engine's process has ended.
        """
        try:
            self._connection.sendall(LENGTH.pack(len(frame)) + frame)
        except OSError as e:
            raise EngineDeadError(f"the connection to the engine has failed: {e}") from None

    def end(self) -> None:
        """End the connection: all later calls of ``receive`` and ``send`` raise an error. Any
        thread may call this method.
        """
        with contextlib.suppress(OSError):  # the socket is already closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
