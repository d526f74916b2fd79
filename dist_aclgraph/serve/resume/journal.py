"""The journal contains all that another process needs to continue the answer to a request.

An answer depends only on the request, on random values, and on the deltas. The journal's memory
contains the request as it arrived (``memory.py``). The random values are written when the request
is accepted. Each delta is written before its text is sent. Another process computes the same bytes
again, omits the bytes that were sent, and continues.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from dist_aclgraph.serve.resume.memory import JournalMemory
from dist_aclgraph.steps.delta import FinishReason, RequestDelta
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs

JOURNAL = "dist_aclgraph.journal"  # an extension that our server offers in the request's scope
RESUMED = "dist_aclgraph.resumed"  # extension of a request that another process has accepted


class Chance(msgspec.Struct, frozen=True):
    """The random values of an answer, which are drawn when the request is accepted."""

    name: str  # name of the reply, without its prefix
    created_s: int
    seed: int  # used if the request has no seed

    @classmethod
    def draw(cls, seed: int) -> Chance:
        return cls(secrets.token_hex(12), int(time.time()), seed)


class JournalBudget(Protocol):
    """Limits the memory of all journals."""

    def take(self, num_bytes: int) -> bool:
        """Count more bytes, and return True. If the limit would be exceeded, count nothing, and
        return False.
        """
        ...

    def give_back(self, num_bytes: int) -> None: ...


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a request. It says that the request has been accepted.

    Attributes:
        num_sent: number of bytes that were sent over the connection before this response.
    """

    num_sent: int
    chance: Chance


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A record after the first record: the content of one delta for one choice."""

    index: int
    token_ids: bytes
    finish_reason: FinishReason | None
    logprobs: tuple[RowLogprobs | None, ...]
    num_cached_tokens: int
    error: str
    error_kind: str
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @classmethod
    def of_delta(cls, index: int, delta: RequestDelta) -> Entry:
        return cls(
            index,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs,
            delta.num_cached_tokens,
            delta.error,
            delta.error_kind,
            delta.prompt_logprobs,
        )

    def delta(self, request_id: str) -> RequestDelta:
        return RequestDelta(
            request_id,
            self.token_ids,
            self.finish_reason,
            self.logprobs,
            self.num_cached_tokens,
            self.error,
            self.error_kind,
            self.prompt_logprobs,
        )


_encode = msgspec.msgpack.Encoder().encode
_decode_opening = msgspec.msgpack.Decoder(Opening).decode
_decode_entry = msgspec.msgpack.Decoder(Entry).decode


class Journal:
    """The journal of one accepted request.

    Args:
        entries: records that a previous process has written.
        is_resumed: whether a previous process has accepted the request.
        memory: the memory to which entries are written. If None, nothing is stored.
        on_end: a function that is called once, after the last write.
    """

    def __init__(
        self,
        chance: Chance,
        entries: tuple[Entry, ...] = (),
        *,
        is_resumed: bool = False,
        memory: JournalMemory | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.chance = chance
        self.is_resumed = is_resumed
        self._entries = entries
        self._memory = memory
        self._on_end = on_end
        self._budget: JournalBudget | None = None
        self._num_bytes = 0  # number of this journal's bytes that the budget counts

    def count_in(self, budget: JournalBudget) -> None:
        """Count the journal's memory in a budget until the journal ends.

        If the journal exceeds the budget, the journal ends, and the answer does not outlive this
        process.
        """
        if self._memory is not None:
            self._budget = budget
            self._count(self._memory.num_record_bytes)

    def _count(self, num_bytes: int) -> bool:
        if self._budget is None:
            return True
        if not self._budget.take(num_bytes):
            self.end()
            return False
        self._num_bytes += num_bytes
        return True

    def take_entries(self) -> tuple[Entry, ...]:
        """Return and drop the entries of a previous process; later calls return no entries."""
        entries, self._entries = self._entries, ()
        return entries

    def note(self, index: int, delta: RequestDelta) -> None:
        """Write a choice's delta, before its text is sent."""
        if (memory := self._memory) is None:
            return
        record = _encode(Entry.of_delta(index, delta))
        if self._count(len(record)) and not memory.append(record):
            self.end()

    def end(self) -> None:
        """Stop writing. Idempotent."""
        if self._memory is not None:
            self._memory = None
            if self._budget is not None:
                self._budget.give_back(self._num_bytes)
            self._on_end()


def write_opening(memory: JournalMemory, opening: Opening) -> bool:
    """Write that a request has been accepted; return whether the memory was large enough."""
    return memory.append(_encode(opening))


def read_records(memory: JournalMemory) -> tuple[Opening | None, tuple[Entry, ...]]:
    """Return the first record and the tuple of all later records; (None, ()) if no request was
    accepted.
    """
    records = memory.records()
    if not records:
        return None, ()
    return _decode_opening(records[0]), tuple(map(_decode_entry, records[1:]))
