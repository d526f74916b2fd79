"""Two processes have descriptors of each connection and its journal, so that connection and journal
outlive the ingress.

The supervisor (``ConnectionHolder``) starts the process that serves HTTP. The serving process
(``HolderLink``) sends the supervisor two descriptors for each connection: one of the connection,
and one of its journal. The serving process also reports the end of each connection. If the serving
process is killed, the supervisor's descriptors stay open. The next serving process inherits these
descriptors, and continues the connections.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import socket
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dist_aclgraph.serve.resume.memory import is_void

NUM_DESCRIPTORS = 2
MESSAGE_BYTES = 64 << 10
MAX_ENDED = 4096  # maximum number of ended connections in one message


class HolderMessage(msgspec.Struct, frozen=True):
    """A process's report about its connections. Each connection has a number.

    Attributes:
        begun: number of a new connection; 0 if no connection is new. The message of a new
            connection also carries the descriptors of the connection and of its journal.
    """

    ended: tuple[int, ...] = ()
    begun: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HolderMessage).decode


class HeldConnection(NamedTuple):
    """The descriptors of a connection and of its journal."""

    connection: int
    journal: int

    def close(self) -> None:
        os.close(self.connection)
        os.close(self.journal)


@dataclass
class HolderLink:
    """The end of the link that the process that answers requests uses. Only one thread may use this
    object.

    Attributes:
        left: the open connections of the previous process, by number.
        max_held: maximum number of connections that the supervisor may hold at the same time.
    """

    link: socket.socket | None = None
    left: dict[int, HeldConnection] = field(default_factory=dict)
    max_held: int = sys.maxsize
    _ended: list[int] = field(default_factory=list)  # ended connections that are not reported yet

    def __post_init__(self) -> None:
        self._numbers = itertools.count(max(self.left, default=0) + 1)
        self._num_held = len(self.left)

    @property
    def has_room(self) -> bool:
        """Whether the supervisor may hold one more connection."""
        return self.link is not None and self._num_held < self.max_held

    def begin(self, connection: int, journal: int) -> int | None:
        """Send the supervisor the descriptors of a connection and its journal; return the number
        that identifies the connection.

        Return None if the supervisor cannot hold the connection.
        """
        if not self.has_room:
            return None
        number = next(self._numbers)
        if not self._tell(number, [connection, journal]):
            return None
        self._num_held += 1
        return number

    def end(self, number: int) -> None:
        """Report that a connection has ended."""
        self._num_held -= 1
        self._ended.append(number)
        self.flush()

    def flush(self) -> None:
        """Report the ended connections that are not reported yet."""
        while self._ended and self._tell(0, []):
            pass

    def _tell(self, begun: int, descriptors: list[int]) -> bool:
        if self.link is None:
            return False
        ended = tuple(self._ended[:MAX_ENDED])
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        try:
            self.link.sendmsg([_encode(HolderMessage(ended, begun))], ancillary)
        except OSError:  # the socket is full or closed, or contains too many descriptors
            return False
        del self._ended[: len(ended)]
        return True


class ConnectionHolder:
    """The supervisor's end of the link. Owns the supervisor's descriptors of connections and
    journals.
    """

    def __init__(self) -> None:
        self._held: dict[int, HeldConnection] = {}
        self._link: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._held)

    def open(self) -> socket.socket:
        """Return the socket for the other end of a new link. The next forked process uses this
        socket.

        The signal SIGIO tells this process that a message has arrived. The caller must handle
        SIGIO, which would otherwise end this process.
        """
        self._lose()
        mine, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        others.setblocking(False)
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(mine, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        self._link = mine
        return others

    def become_link(self, others: socket.socket) -> HolderLink:
        """Call this in the forked process. Returns the forked process's link. Afterwards this
        object owns no descriptors.
        """
        self._close_link()
        left, self._held = self._held, {}
        return HolderLink(others, left)

    def take_in(self) -> None:
        """Read all messages that wait in the link, and apply them."""
        while self._link is not None:
            try:
                text, ancillary, flags, _ = self._link.recvmsg(
                    MESSAGE_BYTES,
                    socket.CMSG_SPACE(NUM_DESCRIPTORS * array.array("i").itemsize),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return
            except OSError:
                text, ancillary, flags = b"", [], 0
            descriptors = _descriptors(ancillary)
            if not text:
                self._close_link()
                return
            message = _decode(text)
            for number in message.ended:
                if (held := self._held.pop(number, None)) is not None:
                    held.close()
            if (
                message.begun
                and len(descriptors) == NUM_DESCRIPTORS
                and not flags & socket.MSG_CTRUNC
            ):
                self._held[message.begun] = HeldConnection(*descriptors)
            # A descriptor is missing if this process cannot open more files. Then the connection
            # ends with its serving process.
            else:
                for descriptor in descriptors:
                    os.close(descriptor)

    def close(self) -> None:
        """Close the link and all held descriptors. Idempotent."""
        self._close_link()
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _lose(self) -> None:
        """Apply the last messages of a process that has ended; end the connections whose journal is
        void.
        """
        self.take_in()
        self._close_link()
        for number, held in list(self._held.items()):
            if is_void(held.journal):
                del self._held[number]
                held.close()

    def _close_link(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.close()
            self._link = None


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
