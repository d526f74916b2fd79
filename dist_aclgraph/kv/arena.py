"""Arena: divides one memory into slots of any size. A slot has one user at a time."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

ALIGNMENT = 4096  # bytes; each slot begins at a multiple of this number


class Slot(NamedTuple):
    """The bytes from ``start`` up to ``end``, relative to the beginning of the memory."""

    start: int
    end: int


class Arena:
    """Owns the bytes from ``start`` up to ``end`` of a memory. Calls from several threads must not
    overlap.
    """

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self._taken: list[Slot] = []  # sorted

    @property
    def is_used(self) -> bool:
        """Whether at least one slot is in use."""
        return bool(self._taken)

    def take(self, num_bytes: int) -> Slot | None:
        """Return a free slot of at least ``num_bytes`` bytes; None if no free range is large
        enough.
        """
        start = self._start
        for slot in (*self._taken, Slot(self._end, self._end)):
            if start + num_bytes <= slot.start:
                taken = Slot(start, start + num_bytes)
                insort(self._taken, taken)
                return taken
            start = -(-slot.end // ALIGNMENT) * ALIGNMENT
        return None

    def give_back(self, slot: Slot) -> None:
        """Free the slot. Nothing may access the slot's bytes after this call."""
        self._taken.remove(slot)
