"""LentFiles: files in this process's memory. Other nodes read these files without the help of this
process.

Other nodes can read one part of this process's memory, which is divided into slots. The server
copies a requested file into a slot, and sends the slot's address to the reader instead of the file.
The slot contains the file until the reader reports the end of the read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple, Protocol

import msgspec

from dist_aclgraph.kv.arena import Arena, Slot
from dist_aclgraph.planning.budget import MAX_LINKS

# A reader that is silent for LEASE_S seconds counts as dead. Then its slots are used for other
# files, and another reader may be admitted. If the silent reader is alive, it may read a slot that
# contains another file. The reader detects the other file by the checksum. A reader ends each link
# that was not used for IDLE_S seconds.
LEASE_S, IDLE_S = 60.0, 30.0
MAX_WAITING = 256  # maximum number of requests that wait for a slot; further requests get no answer

logger = logging.getLogger(__name__)


class LentFile(msgspec.Struct, frozen=True, array_like=True):
    """The address at which another node can read a file.

    Attributes:
        engine: name of the HIXL engine whose process has the file in its memory, as ``host:port``.
        address: address of the file's first byte in the memory of that process.
        num_bytes: size of the file, in bytes.
    """

    engine: str
    address: int
    num_bytes: int


class ReadError(Exception):
    """The memory of another node could not be read."""


class MemoryReader(Protocol):
    """Reads the memory of other nodes into memory of this process."""

    @property
    def engine(self) -> str:
        """Name of this process's HIXL engine."""

    def read(self, lent: LentFile) -> AbstractContextManager[memoryview]:
        """Return a context with the bytes of a file. The bytes are valid only within the context.

        Raises:
            ReadError: the memory of the other node cannot be read, or this process has no room for
                the file.
        """


@dataclass(frozen=True)
class Lender:
    """Memory that other nodes can read.

    Attributes:
        engine: name of this process's HIXL engine.
        address: address of the memory's first byte.
        memory: the memory.
        arena: divides the memory into slots.
    """

    engine: str
    address: int
    memory: memoryview
    arena: Arena


OpenFile = Callable[[], FileIO | None]


class _Key(NamedTuple):
    """A request: the connection of the reader, and the number of the request."""

    peer: bytes
    number: int


class LentAnswer(NamedTuple):
    """The answer to a request. If ``lent`` is None, there is no file."""

    peer: bytes
    number: int
    lent: LentFile | None


@dataclass
class _Request:
    """A request that waits for a slot.

    Attributes:
        open_file: a function that opens the requested file (``LentFiles.ask``). None after the
            function was called.
        file: the result of ``open_file``.
    """

    key: _Key
    open_file: OpenFile | None
    file: FileIO | None = None


@dataclass
class _Loan:
    slot: Slot
    ends_s: float


class LentFiles:
    """Owns the slots of a memory, and the requests that wait for a slot."""

    def __init__(self, lender: Lender, clock: Callable[[], float] = time.monotonic) -> None:
        self._lender = lender
        self._clock = clock
        self._waiting: deque[_Request] = deque()
        self._loans: dict[_Key, _Loan] = {}  # the oldest first
        self._readers: dict[str, float] = {}  # for each reader, the time at which its lease ends
        self._has_warned = False

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for a slot."""
        return bool(self._waiting)

    def ask(self, peer: bytes, number: int, reader: str, open_file: OpenFile | None) -> None:
        """Add a request. If too many requests already wait, the new request is dropped without an
        answer.

        Args:
            peer: the connection of the reader.
            number: number of the request. Each connection numbers its requests in ascending order.
            reader: name of the reader's HIXL engine.
            open_file: a function that opens the file, and returns None if there is no file. The
                function is called when a slot may be free. If the caller already knows that there
                is no file, this argument is None.
        """
        if len(self._waiting) < MAX_WAITING:
            found = open_file if self._admit(reader) else None
            self._waiting.append(_Request(_Key(peer, number), found))

    def end(self, peer: bytes, number: int) -> None:
        """End the requests of a connection up to ``number``, because the reader has read the files
        of these requests.
        """
        ended = [key for key in self._loans if key.peer == peer and key.number <= number]
        for key in ended:
            self._lender.arena.give_back(self._loans.pop(key).slot)
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            if each.key.peer != peer or each.key.number > number:
                self._waiting.append(each)
            elif each.file is not None:
                each.file.close()

    def answers(self) -> Iterator[LentAnswer]:
        """Yield the answers to waiting requests, in order. The iterator ends when no slot is free
        for the file of the next request.
        """
        self._expire()
        while self._waiting:
            request, lent = self._waiting[0], None
            if request.open_file is not None:
                request.file, request.open_file = request.open_file(), None
            if request.file is not None:
                slot = self._lender.arena.take(os.fstat(request.file.fileno()).st_size)
                if slot is None:
                    return
                lent = self._lend(request.key, request.file, slot)
            self._waiting.popleft()
            yield LentAnswer(*request.key, lent)

    def _lend(self, key: _Key, file: FileIO, slot: Slot) -> LentFile | None:
        """Copy a file into a slot. Return None if the file cannot be read, or if the slot of an
        earlier request with the same key is still in use.
        """
        lender, num_read = self._lender, 0
        with file, contextlib.suppress(OSError):  # the disk may fail
            num_read = file.readinto(lender.memory[slot.start : slot.end]) or 0
        if num_read < slot.end - slot.start or key in self._loans:
            lender.arena.give_back(slot)
            return None
        self._loans[key] = _Loan(slot, self._clock() + LEASE_S)
        return LentFile(lender.engine, lender.address + slot.start, num_read)

    def _expire(self) -> None:
        now_s = self._clock()
        late = [key for key, loan in self._loans.items() if loan.ends_s < now_s]
        for key in late:
            self._lender.arena.give_back(self._loans.pop(key).slot)

    def _admit(self, reader: str) -> bool:
        """Return whether a reader may read. The number of readers is limited, because each reader's
        link uses streams of this node's device.
        """
        now_s = self._clock()
        self._readers = {name: end_s for name, end_s in self._readers.items() if end_s > now_s}
        if reader not in self._readers and len(self._readers) >= MAX_LINKS:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "more than %d nodes fetch KV blocks from this node at the same time; the "
                    "others compute them",
                    MAX_LINKS,
                )
            return False
        self._readers[reader] = now_s + LEASE_S
        return True
