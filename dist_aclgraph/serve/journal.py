"""Journal: what must be known of a request that is being answered, to go on from another process.

An answer is a function of the request, of what was left to chance, and of the deltas that came. So
these are written down, each delta before anything of it is sent; whoever reads them makes the same
bytes again, leaves out those that have been sent, and goes on.

A journal lies in memory that outlives the process (``kept.py``), and belongs to one event loop.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator

import msgspec

from dist_aclgraph.steps.delta import FinishReason, RequestDelta
from dist_aclgraph.steps.step import RowLogprobs

JOURNAL = "dist_aclgraph.journal"  # what a server of ours offers in the extensions of its scope
RESUMED = "dist_aclgraph.resumed"  # and where another process has accepted the request
# Of one request. What exceeds it is answered as ever, and ends with its process.
MAX_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")


class Chance(msgspec.Struct, frozen=True):
    """What nobody but chance decides of an answer, drawn once."""

    name: str  # of the reply, behind its prefix
    created_s: int
    seed: int  # where the request brings none

    @classmethod
    def draw(cls, seed: int) -> Chance:
        return cls(secrets.token_hex(12), int(time.time()), seed)


class Opening(msgspec.Struct, frozen=True):
    """How a journal begins.

    Attributes:
        request: as it goes over the wire.
        num_sent: bytes that the connection had been given before the response.
    """

    request: bytes
    num_sent: int
    chance: Chance


class Entry(msgspec.Struct, frozen=True, array_like=True):
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


_encode = msgspec.msgpack.Encoder().encode
_decode_opening = msgspec.msgpack.Decoder(Opening).decode
_decode_entry = msgspec.msgpack.Decoder(Entry).decode


class Journal:
    """One request's. Owns its file from its making until its end; without one, nothing is kept.

    Args:
        entries: what is known from before.
        is_resumed: whether another process has accepted the request.
        file: a descriptor, at its end.
        on_end: called once, when nobody needs the journal any more.
    """

    def __init__(
        self,
        chance: Chance,
        entries: tuple[Entry, ...] = (),
        *,
        is_resumed: bool = False,
        file: int | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.chance = chance
        self.is_resumed = is_resumed
        self._entries = entries
        self._file = file
        self._on_end = on_end
        self._num_bytes = 0 if file is None else os.fstat(file).st_size

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
        record = _framed(_encode(entry))
        self._num_bytes += len(record)
        if self._num_bytes > MAX_BYTES or not _has_written(self._file, record):
            os.ftruncate(self._file, 0)  # whoever has it still must not go on from here
            self.end()

    def end(self) -> None:
        """Keep nothing any more. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._on_end()


def begin(opening: Opening) -> int | None:
    """Return the file of a new journal; None where there is no room for it."""
    record = _framed(_encode(opening))
    if len(record) > MAX_BYTES:
        return None
    try:
        file = os.memfd_create("journal", os.MFD_CLOEXEC)
    except OSError:
        return None
    if _has_written(file, record):
        return file
    os.close(file)
    return None


def read(file: int) -> tuple[Opening, tuple[Entry, ...]]:
    """Return what a journal says, and have it go on behind that: its writer may have been killed
    within an entry, of which nothing had been sent.

    Raises:
        ValueError: it has no beginning.
    """
    text = os.pread(file, MAX_BYTES, 0)
    records = list(_records(text))
    if not records:
        raise ValueError("the journal is empty")
    end = sum(_LENGTH.size + len(record) for record in records)
    os.ftruncate(file, end)
    os.lseek(file, end, os.SEEK_SET)
    return _decode_opening(records[0]), tuple(map(_decode_entry, records[1:]))


def _records(text: bytes) -> Iterator[bytes]:
    start = 0
    while start + _LENGTH.size <= len(text):
        (length,) = _LENGTH.unpack_from(text, start)
        start += _LENGTH.size
        if start + length > len(text):
            return
        yield text[start : start + length]
        start += length


def _framed(record: bytes) -> bytes:
    return _LENGTH.pack(len(record)) + record


def _has_written(file: int, record: bytes) -> bool:
    try:
        return os.write(file, record) == len(record)
    except OSError:  # no memory
        return False
