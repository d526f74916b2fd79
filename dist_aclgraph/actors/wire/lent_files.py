"""LentFiles: files in memory that engines on other nodes read by themselves, without this process.

The server of files copies a file into a slot of a memory that other nodes can read, and sends the
slot's address instead of the file. The slot keeps the file until the reader no longer needs it.
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

# A reader that is silent for LEASE_S counts as dead: its slots get other files, and other readers
# take its place. If it is alive after all, it changes nothing, because it only reads; and the
# checksum shows that the file is another one. A reader ends a link that it has not used for IDLE_S.
LEASE_S, IDLE_S = 60.0, 30.0
MAX_WAITING = 256  # maximum number of requests that wait for a slot; others get no answer

logger = logging.getLogger(__name__)


class LentFile(msgspec.Struct, frozen=True, array_like=True):
    """Where another node finds a file.

    Attributes:
        engine: name of the engine whose memory contains the file, as ``host:port``.
        address: the file's first byte in the memory of that engine's process.
        num_bytes: size of the file.
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
        """Name of this process's engine."""

    def read(self, lent: LentFile) -> AbstractContextManager[memoryview]:
        """Return a context with the bytes of a file. Afterwards, their memory may get another file.

        Raises:
            ReadError: the memory cannot be read, or there is no room for it.
        """


@dataclass(frozen=True)
class Lender:
    """Memory that other nodes can read.

    Attributes:
        engine: name of this process's engine.
        address: address of the memory's first byte.
        memory: the memory.
        arena: the part of the memory that is lent.
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
    """The answer to a request; None as ``lent`` means that there is no file."""

    peer: bytes
    number: int
    lent: LentFile | None


@dataclass
class _Request:
    """A request that waits for a slot.

    Attributes:
        open_file: see ``LentFiles.ask``; None after it was called.
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
        self._readers: dict[str, float] = {}  # for each reader, the end of its lease
        self._has_warned = False

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for a slot."""
        return bool(self._waiting)

    def ask(self, peer: bytes, number: int, reader: str, open_file: OpenFile | None) -> None:
        """Add a request. If too many requests wait, it gets no answer.

        Args:
            peer: the connection of the reader.
            number: number of the request, which rises with each request of a connection.
            reader: name of the reader's engine.
            open_file: opens the file when a slot may be free; returns None if there is no file.
                None also means that there is no file.
        """
        if len(self._waiting) < MAX_WAITING:
            found = open_file if self._admit(reader) else None
            self._waiting.append(_Request(_Key(peer, number), found))

    def end(self, peer: bytes, number: int) -> None:
        """End the requests of a connection up to a number, whose files are no longer needed."""
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
        """Yield the answers to waiting requests, until a request finds no room."""
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
        """Copy a file into a slot; return None if it cannot be read, or if the reader has used the
        number of the request before.
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
        """Return whether a reader may read. Each reader has a link, which takes streams here."""
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
