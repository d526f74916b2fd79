"""Stores the journal of one connection in memory that outlives the writing process.

| offset | content |
| --- | --- |
| 0 | number of the current slot, 1 or 2; 0 if the journal is void, 3 if it is new |
| 8 | slot 1, then slot 2; each has five words: see ``_NUM_READ`` and the following names |
| ``REQUEST_AT`` | the request |
| ``RECORDS_AT`` | the records; each record follows its length |

The bytes of a connection are read directly into the request's part of this memory. This memory
therefore contains every byte that was read. The kernel also counts the bytes read from the
connection (``counters.py``). The size of the request is the current count minus the count when the
journal was cleared.

A process may be killed between any two instructions. Therefore the last step of each change stores
one word. This word makes the change valid.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct

READ_BYTES = 64 << 10  # bytes that are read from one connection at once
# Limits for one request and for the records of its answer. A larger answer cannot outlive its
# process.
REQUEST_BYTES = RECORD_BYTES = 8 << 20
REQUEST_AT = mmap.PAGESIZE
RECORDS_AT = REQUEST_AT + REQUEST_BYTES
SIZE = RECORDS_AT + RECORD_BYTES
STAYING_BYTES = 16 << 10  # when a journal is cleared, only this much memory stays allocated
_LENGTH = struct.Struct("=I")
_WORD = struct.Struct("=Q")
_VOID, _NEW = 0, 3
_SLOT_WORDS = 5
# The words of a slot. _NUM_READ, _NUM_SENT: bytes read and sent until the journal was cleared.
# _RECORDS_END: offset of the next record. _NUM_LOSSES: number of processes that died during this
# request since the last record. _LOSSES_AT: the value of _RECORDS_END when the last of these
# processes died.
_NUM_READ, _NUM_SENT, _RECORDS_END, _NUM_LOSSES, _LOSSES_AT = range(_SLOT_WORDS)


class JournalMemory:
    """One connection's journal. Owns the memory mapping and the mapping's own descriptor.

    Args:
        descriptor: descriptor of memory that ``create`` has made; the caller closes it.

    Attributes:
        num_read: bytes read from the connection until the journal was cleared.
        num_sent: bytes sent over the connection until the journal was cleared.
        is_void: whether the journal lacks bytes that were read or sent.
        is_new: true until ``begin`` is called; the counts are unknown until then.

    Raises:
        OSError: the memory cannot be mapped.
        ValueError: the journal is void.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, SIZE)
        self._records_end = 0
        with memoryview(self._map) as whole:
            self._words = whole[:REQUEST_AT].cast("Q")
            self._request = whole[REQUEST_AT:RECORDS_AT]
        self.is_void, self.is_new = (self._words[0] == state for state in (_VOID, _NEW))
        self._slot = 0
        if self.is_void:
            self.close()
            raise ValueError("the journal lacks something that was read or sent")
        if not self.is_new:
            self._use_slot(self._words[0])

    @classmethod
    def create(cls) -> tuple[JournalMemory, int]:
        """Return a new journal, and a descriptor of its memory, which the caller must close.

        Raises:
            OSError: the system has no memory for the journal.
        """
        descriptor = os.memfd_create("journal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, SIZE)
            os.pwrite(descriptor, _WORD.pack(_NEW), 0)
            return cls(descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def begin(self, num_read: int, num_sent: int) -> None:
        """Begin a new journal, before anything is read from or sent over its connection.

        Args:
            num_read, num_sent: bytes read from and sent over the connection until now.
        """
        self._switch(1, num_read, num_sent)
        self.is_new = False

    def request_buffer(self, start: int) -> memoryview:
        """Return the memory for the request's next bytes; empty if the request's part is full."""
        return self._request[start : start + READ_BYTES]

    def request(self, start: int, end: int) -> bytes:
        return self._map[REQUEST_AT + start : REQUEST_AT + end]

    def append(self, record: bytes) -> bool:
        """Add a record; if it does not fit, make the journal void.

        Return whether the record was added.
        """
        end = self._records_end + _LENGTH.size + len(record)
        if end > RECORD_BYTES:
            self.void()
        if self.is_void:
            return False
        self._map[RECORDS_AT + self._records_end : RECORDS_AT + end] = (
            _LENGTH.pack(len(record)) + record
        )
        self._words[self._slot_at + _RECORDS_END] = self._records_end = end
        return True

    @property
    def num_record_bytes(self) -> int:
        return self._records_end

    def records(self) -> list[bytes]:
        start, end = RECORDS_AT, RECORDS_AT + self._records_end
        found = []
        while start < end:
            (length,) = _LENGTH.unpack_from(self._map, start)
            start += _LENGTH.size
            found.append(self._map[start : start + length])
            start += length
        return found

    def count_loss(self) -> int:
        """Count one more process that died while it answered the request.

        Returns:
            The number of processes that died since the last record was added.
        """
        at = self._slot_at
        if self._words[at + _LOSSES_AT] != self._records_end:
            self._words[at + _LOSSES_AT], self._words[at + _NUM_LOSSES] = self._records_end, 0
        self._words[at + _NUM_LOSSES] += 1
        return self._words[at + _NUM_LOSSES]

    def void(self) -> None:
        """Mark the journal as void. Until ``clear`` is called, no process can continue from the
        journal.
        """
        if not self.is_void:
            self.is_void = True
            self._words[0] = _VOID
            self._give_back()

    def clear(self, num_read: int, num_sent: int) -> None:
        """Clear the journal after all requests have been answered.

        Args:
            num_read, num_sent: bytes read from and sent over the connection until now.
        """
        num_used = max(num_read - self.num_read, self._records_end)
        self._switch(3 - self._slot, num_read, num_sent)
        self.is_void = False
        if num_used > STAYING_BYTES:
            self._give_back()

    def close(self) -> None:
        """Close the mapping. The memory exists as long as any process has a descriptor of the
        memory.
        """
        self._words.release()
        self._request.release()
        with contextlib.suppress(BufferError):  # the event loop is reading into the mapping
            self._map.close()

    def _switch(self, slot: int, num_read: int, num_sent: int) -> None:
        """Write a slot without records, and make it the current slot."""
        at = 1 + (slot - 1) * _SLOT_WORDS
        for i, word in enumerate((num_read, num_sent, 0, 0, 0)):
            self._words[at + i] = word
        self._words[0] = slot
        self._use_slot(slot)

    def _use_slot(self, slot: int) -> None:
        self._slot = slot
        self._slot_at = at = 1 + (slot - 1) * _SLOT_WORDS
        self.num_read, self.num_sent = self._words[at + _NUM_READ], self._words[at + _NUM_SENT]
        self._records_end = self._words[at + _RECORDS_END]

    def _give_back(self) -> None:
        """Free the memory of the request and the records. Later reads return zeros."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, REQUEST_AT, SIZE - REQUEST_AT)


def is_void(descriptor: int) -> bool:
    """Return whether the journal in this memory is void."""
    return os.pread(descriptor, _WORD.size, 0) in (b"", bytes(_WORD.size))
