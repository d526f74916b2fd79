"""Journal: what must be known of a connection, to go on with it from another process.

An answer is a function of the request, of what was left to chance, and of the deltas that came. So
these are written down: what a client sends when it is read, each delta before anything of it is
sent. Whoever reads them makes the same bytes again, leaves out those that have been sent, and goes
on.

A journal lies in memory that outlives the process (``kept.py``), and belongs to one event loop.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from dist_aclgraph.steps.delta import FinishReason, RequestDelta
from dist_aclgraph.steps.step import RowLogprobs

JOURNAL = "dist_aclgraph.journal"  # what a server of ours offers in the extensions of its scope
RESUMED = "dist_aclgraph.resumed"  # and where another process has accepted the request
# Of one request. What exceeds it is answered as ever, and ends with its process.
MAX_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")
# How a file begins, and behind it: how often it was cleared, and bytes of the connection that had
# been read then. The second word takes the place of the first at once, and wants no memory.
LIVE, VOID = b"live", b"void"
_HEAD = struct.Struct("<4sIQ")


class Chance(msgspec.Struct, frozen=True):
    """What nobody but chance decides of an answer, drawn once."""

    name: str  # of the reply, behind its prefix
    created_s: int
    seed: int  # where the request brings none

    @classmethod
    def draw(cls, seed: int) -> Chance:
        return cls(secrets.token_hex(12), int(time.time()), seed)


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag="arrival"):
    """What a client has sent of its request.

    Attributes:
        num_sent: bytes that the connection had been given before it came.
        num_read: bytes that had been read of the connection with it.
    """

    num_sent: int
    num_read: int
    data: bytes


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """The request has been accepted, and is going to be answered.

    Attributes:
        num_sent: bytes that the connection had been given before the response.
    """

    num_sent: int
    chance: Chance


class Entry(msgspec.Struct, frozen=True, array_like=True, tag="entry"):
    """What one delta brought to one choice."""

    index: int  # of the choice
    token_ids: bytes
    finish_reason: FinishReason | None
    logprobs: tuple[RowLogprobs | None, ...]
    num_cached_tokens: int
    error: str
    error_kind: str

    def delta(self, request_id: str) -> RequestDelta:
        return RequestDelta(
            request_id,
            self.token_ids,
            self.finish_reason,
            self.logprobs,
            self.num_cached_tokens,
            self.error,
            self.error_kind,
        )


Record = Arrival | Opening | Entry
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class JournalFile:
    """What is written of one connection. Owns its descriptor.

    Args:
        descriptor: of a file whose end is the end of its last record.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._num_bytes = os.fstat(descriptor).st_size
        self._is_void = False  # one of a dead process that is void is never opened again
        _, self._num_clears, _ = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))

    @classmethod
    def make(cls, num_read: int) -> JournalFile | None:
        """Return an empty one; None where there is no room for it.

        Args:
            num_read: bytes of the connection that have been read.
        """
        try:
            descriptor = os.memfd_create("journal", os.MFD_CLOEXEC)
        except OSError:
            return None
        if _has_written(descriptor, _HEAD.pack(LIVE, 0, num_read)):
            return cls(descriptor)
        os.close(descriptor)
        return None

    def append(self, record: Record) -> bool:
        """Write a record down; where that cannot be, the file is void."""
        text = _encode(record)
        text = _LENGTH.pack(len(text)) + text
        self._num_bytes += len(text)
        if self._is_void or self._num_bytes > MAX_BYTES or not _has_written(self.descriptor, text):
            self.void()
            return False
        return True

    def void(self) -> None:
        """Say that nobody can go on from here: not all is known. Idempotent."""
        if not self._is_void:
            self._is_void = True
            os.pwrite(self.descriptor, VOID, 0)
            self._cut()

    def clear(self, num_read: int) -> None:
        """Begin anew: all has been answered.

        Args:
            num_read: bytes of the connection that have been read.
        """
        self._num_clears = (self._num_clears + 1) % (1 << 32)
        # First the head: records of before, where this process is killed here, are known by it.
        os.pwrite(self.descriptor, _HEAD.pack(LIVE, self._num_clears, num_read), 0)
        self._cut()
        self._is_void = False

    def _cut(self) -> None:
        _cut(self.descriptor, _HEAD.size)
        self._num_bytes = _HEAD.size

    def close(self) -> None:
        os.close(self.descriptor)


class Journal:
    """One accepted request's part of a file; without one, nothing is kept.

    Args:
        entries: what is known from before.
        is_resumed: whether another process has accepted the request.
        on_end: called once, when nobody needs the journal any more.
    """

    def __init__(
        self,
        chance: Chance,
        entries: tuple[Entry, ...] = (),
        *,
        is_resumed: bool = False,
        file: JournalFile | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.chance = chance
        self.is_resumed = is_resumed
        self._entries = entries
        self._file = file
        self._on_end = on_end

    @property
    def is_kept(self) -> bool:
        return self._file is not None

    def take_entries(self) -> tuple[Entry, ...]:
        """Return what is known from before; once, as it may be large."""
        entries, self._entries = self._entries, ()
        return entries

    def note(self, index: int, delta: RequestDelta) -> None:
        """Write down what a choice gets, before it is sent."""
        if self._file is None:
            return
        entry = Entry(
            index,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs,
            delta.num_cached_tokens,
            delta.error,
            delta.error_kind,
        )
        if not self._file.append(entry):
            self.end()

    def end(self) -> None:
        """Write nothing any more. Idempotent."""
        if self._file is not None:
            self._file = None
            self._on_end()


class Known(NamedTuple):
    """What a journal says.

    Attributes:
        request: as it came over the wire, as far as it did.
        num_sent: bytes that the connection had been given before the response.
        num_read: bytes of the connection that had been read. What was read behind them is lost.
        chance: None while the request has not been accepted.
    """

    request: bytes
    num_sent: int
    num_read: int
    chance: Chance | None
    entries: tuple[Entry, ...]


def read(descriptor: int) -> Known:
    """Return what a journal says. Have it go on behind that: its writer may have been killed within
    a record, and had done nothing with that yet.

    Raises:
        ValueError: nobody can go on from here.
    """
    text = os.pread(descriptor, MAX_BYTES, 0)
    if not text.startswith(LIVE) or len(text) < _HEAD.size:
        raise ValueError("not all of it is known")
    _, _, num_read = _HEAD.unpack_from(text)
    found = list(_records(text))
    records = [_decode(record) for record in found]
    arrivals = [record for record in records if isinstance(record, Arrival)]
    if not arrivals or arrivals[0].num_read <= num_read:  # none, or of before it was cleared
        _cut(descriptor, _HEAD.size)
        return Known(b"", 0, num_read, None, ())
    _cut(descriptor, _HEAD.size + sum(_LENGTH.size + len(record) for record in found))
    opening = next((record for record in records if isinstance(record, Opening)), None)
    entries = tuple(record for record in records if isinstance(record, Entry))
    first = arrivals[0] if opening is None else opening
    chance = None if opening is None else opening.chance
    request = b"".join(arrival.data for arrival in arrivals)
    return Known(request, first.num_sent, arrivals[-1].num_read, chance, entries)


class Use(NamedTuple):
    """What a journal is in use for, for whoever keeps it.

    Attributes:
        request: the number of the request that is under way; None while none is.
        is_void: whether nobody can go on with it.
    """

    request: int | None
    is_void: bool


def use_of(descriptor: int) -> Use:
    text = os.pread(descriptor, _HEAD.size, 0)
    if len(text) < _HEAD.size or not text.startswith(LIVE):
        return Use(None, is_void=True)
    _, num_clears, _ = _HEAD.unpack(text)
    is_empty = os.fstat(descriptor).st_size <= _HEAD.size
    return Use(None if is_empty else num_clears, is_void=False)


def _cut(descriptor: int, num_bytes: int) -> None:
    os.ftruncate(descriptor, num_bytes)
    os.lseek(descriptor, num_bytes, os.SEEK_SET)


def _has_written(descriptor: int, text: bytes) -> bool:
    try:
        return os.write(descriptor, text) == len(text)
    except OSError:  # no memory
        return False


def _records(text: bytes) -> Iterator[bytes]:
    start = _HEAD.size
    while start + _LENGTH.size <= len(text):
        (length,) = _LENGTH.unpack_from(text, start)
        start += _LENGTH.size
        if start + length > len(text):
            return
        yield text[start : start + length]
        start += length
