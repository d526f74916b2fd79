"""The record of a connection: everything that another process needs to continue the connection."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from dist_aclgraph.serve.resume.counters import read_counters
from dist_aclgraph.serve.resume.holder import HeldConnection, HolderLink
from dist_aclgraph.serve.resume.journal import (
    Chance,
    Entry,
    Journal,
    Opening,
    read_records,
    write_opening,
)
from dist_aclgraph.serve.resume.memory import READ_BYTES, JournalMemory

# After this number of deaths during a request, no process continues the request, because the
# request might be the cause. Deaths before the answer's last progress do not count.
MAX_LOSSES = 3
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Buffer for the bytes of connections that cannot outlive this process.
_scratch = memoryview(bytearray(READ_BYTES))


class ResumedRequest(NamedTuple):
    """The state of a request that a previous process has begun to answer.

    Attributes:
        journal: journal of the answer; None if the request was not accepted.
        may_send_body: whether the client was told to send its body.
    """

    journal: Journal | None
    may_send_body: bool


class ConnectionRecord:
    """The record of one connection. Owns its journal's memory, and counts bytes read and sent.

    The journal can store one request and its answer. The journal becomes void if several requests
    are in progress on the connection, or if the memory is full. A connection with a void journal
    ends with this process.

    Args:
        link: link to the process that holds connections while another process replaces this
            process; None if the connections end with this process.

    Attributes:
        is_spent: whether the journal's request has been answered.
        num_omitted: number of the answer's next bytes that this process must not send, because a
            previous process has sent them.
    """

    def __init__(self, link: HolderLink | None) -> None:
        self.is_spent = False
        self.num_omitted = 0
        self._link = link
        self._descriptor = -1
        self._number = 0  # the supervisor's number of the connection; 0 if none
        self._memory: JournalMemory | None = None
        # the journal's memory and its descriptor, until the supervisor holds the connection
        self._prepared: tuple[JournalMemory, int] | None = None
        self._num_read = self._num_sent = 0
        self._journal: Journal | None = None  # journal of the request that is being answered
        self._resumed: ResumedRequest | None = None

    @classmethod
    def take_over(cls, link: HolderLink, number: int, held: HeldConnection) -> ConnectionRecord:
        """Return the record of an open connection of a previous process.

        Raises:
            OSError, ValueError: no process can continue the connection.
        """
        record = cls(link)
        record._number = number
        try:
            record._resume(held)
        except BaseException:
            record.close()
            raise
        return record

    def _resume(self, held: HeldConnection) -> None:
        self._num_read, self._num_sent, is_open = read_counters(held.connection)
        if not is_open:
            raise ValueError("the client has left")
        self._memory = memory = JournalMemory(held.journal)
        if memory.is_new:
            memory.begin(self._num_read, self._num_sent)
        opening, entries = read_records(memory)
        if self._num_request and memory.count_loss() >= MAX_LOSSES:
            raise ValueError(f"{MAX_LOSSES} processes died with its request")
        num_sent = self._num_sent - (opening or memory).num_sent
        if num_sent < 0:
            raise ValueError("bytes that had been written were lost")
        if opening is not None:
            self.num_omitted = num_sent
            self._begin_journal(opening.chance, entries, is_resumed=True)
        elif num_sent not in (0, len(CONTINUE)):
            raise ValueError("a response has begun that cannot be made again")
        self._resumed = ResumedRequest(self._journal, may_send_body=bool(num_sent or opening))

    # -- connection ------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether the connection and the request on it outlive this process."""
        return self._memory is not None and not self._memory.is_void

    @property
    def is_owed(self) -> bool:
        """Whether this process must answer a request that a previous process accepted."""
        return self._resumed is not None and self._resumed.journal is not None

    def prepare(self) -> None:
        """Allocate the journal's memory in advance, so that a later call of ``hold`` is faster."""
        if self._prepared is None and self._link is not None and self._link.has_room:
            with contextlib.suppress(OSError):
                self._prepared = JournalMemory.create()

    def hold(self, descriptor: int) -> None:
        """Let the supervisor hold the connection, unless the supervisor already holds the maximum
        number of connections. Call this before any byte is read from or sent over the connection.

        The connection ends if the process is killed before the supervisor has the connection's
        descriptor. So the descriptor is sent at once, before anything is read.
        """
        self._descriptor = descriptor
        if self._memory is not None:
            return
        self.prepare()
        if self._prepared is None or self._link is None:
            return
        (memory, journal), self._prepared = self._prepared, None
        number = self._link.begin(descriptor, journal)
        os.close(journal)
        if number is not None:
            self._number, self._memory = number, memory
            with contextlib.suppress(OSError):  # the connection has no counters
                self._num_read, self._num_sent, _ = read_counters(descriptor)
                memory.begin(self._num_read, self._num_sent)
                return
        self._let_go(memory)

    def close(self) -> None:
        """Free the connection's resources, because the connection has ended."""
        if self._journal is not None:
            self._journal.end()
        if self._prepared is not None:
            memory, journal = self._prepared
            self._prepared = None
            memory.close()
            os.close(journal)
        self._let_go(self._memory)

    def _let_go(self, memory: JournalMemory | None) -> None:
        """Close the journal's memory. If the supervisor holds the connection, tell the supervisor
        that the connection has ended.
        """
        if memory is not None:
            memory.close()
        self._memory = None
        if self._number and self._link is not None:
            self._link.end(self._number)
            self._number = 0

    # -- bytes -----------------------------------------------------------------------------------

    def read_buffer(self) -> memoryview:
        """Return the memory into which the connection's next bytes must be read."""
        if self._memory is not None and not self._memory.is_void:
            if buffer := self._memory.request_buffer(self._num_request):
                return buffer
            self.void()
        return _scratch

    def take_read(self, num_bytes: int) -> bytes:
        """Add ``num_bytes`` to the count of bytes that were read, and return these bytes of
        ``read_buffer``.
        """
        begin = self._num_request
        self._num_read += num_bytes
        if self._memory is None or self._memory.is_void:
            return bytes(_scratch[:num_bytes])
        return self._memory.request(begin, begin + num_bytes)

    def all_read(self) -> bytes:
        """Return all bytes of the request, including the bytes that the previous
        process has read.
        """
        return b"" if self._memory is None else self._memory.request(0, self._num_request)

    def take_unsent(self, data: bytes) -> bytes:
        """Return ``data`` without the bytes that a previous process has sent, and count the
        returned bytes.
        """
        if self.num_omitted:
            unsent = data[self.num_omitted :]
            self.num_omitted -= len(data) - len(unsent)
            data = unsent
        self._num_sent += len(data)
        return data

    # -- requests --------------------------------------------------------------------------------

    def take_resumed(self) -> ResumedRequest | None:
        """The first call returns the state of the request that the previous process had begun. All
        later calls return None.
        """
        resumed, self._resumed = self._resumed, None
        return resumed

    def open_journal(self, chance: Chance, *, is_alone: bool) -> Journal:
        """Begin the journal of a request that was accepted.

        Args:
            is_alone: whether no other request is in progress on the connection.
        """
        memory = self._memory
        if memory is None or memory.is_void or self.is_spent or not is_alone:
            return Journal(chance)
        if not write_opening(memory, Opening(self._num_sent, chance)):
            return Journal(chance)
        return self._begin_journal(chance)

    def spend(self) -> None:
        """Record that the journal's request was answered. From now on, the journal accepts no
        entries.
        """
        self.is_spent = True
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.end()

    def clear(self) -> None:
        """Clear the journal, because all requests have been answered, and all answers have been
        sent.
        """
        self.is_spent = False
        if self._memory is None:
            self.hold(self._descriptor)
        else:
            self._memory.clear(self._num_read, self._num_sent)

    def void(self) -> None:
        """Mark the journal as void, so that no process continues the connection's request."""
        if self._memory is not None:
            self._memory.void()
        if self._journal is not None:
            self._journal.end()

    @property
    def _num_request(self) -> int:
        return 0 if self._memory is None else self._num_read - self._memory.num_read

    def _begin_journal(
        self, chance: Chance, entries: tuple[Entry, ...] = (), *, is_resumed: bool = False
    ) -> Journal:
        def end() -> None:
            if self._journal is journal:  # true if the journal ends before the answer is complete
                self._journal = None
                self.void()

        self._journal = journal = Journal(
            chance, entries, is_resumed=is_resumed, memory=self._memory, on_end=end
        )
        return journal
