"""Connections that outlive the process which answers on them, with their journals.

Whoever starts that process (``Keep``) holds a descriptor of each connection, and of its journal:
the process hands them over with a message (``Keeper``), and says when they have ended. What is
killed closes only its own descriptors. The next process is forked with those that are left, and
goes on.
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

import msgspec

from dist_aclgraph.serve.intake import Intake
from dist_aclgraph.serve.journal import Arrival, JournalFile, Known, read, use_of
from dist_aclgraph.serve.sent_bytes import is_open, num_read_bytes, num_sent_bytes

MAX_LOSSES = 3  # processes that died with one request: it may be why
MAX_DESCRIPTORS = 2
MESSAGE_BYTES = 64 << 10
MAX_ENDED = 4096  # in one message


class Told(msgspec.Struct, frozen=True):
    """What a process says of its connections, by their numbers."""

    ended: tuple[int, ...] = ()
    begun: int = 0  # with its descriptor and that of its journal; 0 for none


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode


@dataclass
class Kept:
    """A connection and its journal: two descriptors.

    Attributes:
        last_read: begins with what a process that died had read and not written down, where it had.
    """

    connection: int
    journal: int
    losses: int = 0  # of ``request``
    request: int | None = None
    last_read: bytes = b""

    def known(self) -> Known:
        """Return what is known of the connection. What was read of a request and not written down
        before its process died, is written down now.

        Raises:
            OSError, ValueError: nobody can go on.
        """
        known = read(self.journal)
        num_read = num_read_bytes(self.connection)
        missing = num_read - known.num_read
        if not missing:
            return known
        is_here = 0 < missing <= len(self.last_read) and is_open(self.connection)
        if is_here and known.chance is None:
            num_sent = num_sent_bytes(self.connection)
            arrival = Arrival(num_sent, num_read, self.last_read[:missing])
            if JournalFile(self.journal).append(arrival):
                return read(self.journal)
        raise ValueError("not all that was read is known, or the client has left")

    def close(self) -> None:
        os.close(self.connection)
        os.close(self.journal)


@dataclass
class Keeper:
    """The end of the process that answers: for one thread.

    Attributes:
        left: connections of the process before, by their numbers.
        intake: what connections are read into.
        max_kept: how many may be kept at once.
    """

    link: socket.socket | None = None
    left: dict[int, Kept] = field(default_factory=dict)
    intake: Intake = field(default_factory=Intake)
    max_kept: int = sys.maxsize
    _ended: list[int] = field(default_factory=list)  # not said yet

    def __post_init__(self) -> None:
        self._numbers = itertools.count(max(self.left, default=0) + 1)
        self._num_kept = len(self.left)

    @property
    def has_room(self) -> bool:
        """Whether one connection more may be kept."""
        return self.link is not None and self._num_kept < self.max_kept

    def begin(self, connection: int, journal: int) -> int | None:
        """Have a connection kept; return its number, None where that cannot be."""
        if not self.has_room:
            return None
        number = next(self._numbers)
        if not self._tell(number, [connection, journal]):
            return None
        self._num_kept += 1
        return number

    def end(self, number: int) -> None:
        """Have a connection kept no more."""
        self._num_kept -= 1
        self._ended.append(number)
        self.flush()

    def flush(self) -> None:
        """Say what could not be said before."""
        while self._ended and self._tell(0, []):
            pass

    def _tell(self, begun: int, descriptors: list[int]) -> bool:
        if self.link is None:
            return False
        ended = tuple(self._ended[:MAX_ENDED])
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        try:
            self.link.sendmsg([_encode(Told(ended, begun))], ancillary)
        except OSError:  # it is full, or so many descriptors are under way, or nobody listens
            return False
        del self._ended[: len(ended)]
        return True


class Keep:
    """The end of the process that starts the others. Owns what it keeps."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._intake = Intake()
        self._link: socket.socket | None = None
        self._is_open = False  # since the last process began

    def __len__(self) -> int:
        return len(self._kept)

    def open(self) -> socket.socket:
        """Return the other end of a new link, for a process that is forked next.

        This process gets SIGIO when something comes, by which it must not end.
        """
        self.lose()
        mine, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        others.setblocking(False)
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(mine, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        self._link, self._is_open = mine, True
        return others

    def forgo(self) -> None:
        """Close the link of ``open``: no process was forked for it, so that none has been lost."""
        self._is_open = False
        self._close_link()

    def become_keeper(self, others: socket.socket) -> Keeper:
        """In a process that was forked: return its end. Nothing is kept here any more."""
        self._close_link()
        left, self._kept = self._kept, {}
        return Keeper(others, left, self._intake)

    def take_in(self) -> None:
        """Read what has been said."""
        while self._link is not None:
            try:
                text, ancillary, flags, _ = self._link.recvmsg(
                    MESSAGE_BYTES,
                    socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize),
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
            told = _decode(text)
            for number in told.ended:
                if (kept := self._kept.pop(number, None)) is not None:
                    kept.close()
            if told.begun and len(descriptors) == MAX_DESCRIPTORS and not flags & socket.MSG_CTRUNC:
                self._kept[told.begun] = Kept(descriptors[0], descriptors[1])
            else:  # this process may not open as many: the connection ends with its process
                for descriptor in descriptors:
                    os.close(descriptor)

    def lose(self) -> None:
        """Keep what a process that has ended had, but for what may have killed it."""
        if not self._is_open:
            return
        self._is_open = False
        self.take_in()
        self._close_link()
        number, last_read = self._intake.last()
        if number in self._kept:
            self._kept[number].last_read = last_read
        for number, kept in list(self._kept.items()):
            request, is_void = use_of(kept.journal)
            if request is None or request != kept.request:
                kept.losses = 0
            kept.request = request
            kept.losses += request is not None
            if is_void or kept.losses >= MAX_LOSSES:
                del self._kept[number]
                kept.close()

    def close(self) -> None:
        """Keep nothing. Idempotent."""
        self._close_link()
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()

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
