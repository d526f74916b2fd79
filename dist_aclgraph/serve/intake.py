"""Intake: memory into which a process reads what its clients send, and which outlives it.

A process may be killed when the kernel has given it bytes and before it has written them down
(``journal.py``). They are still here then, for whoever has started that process (``kept.py``). A
process reads one connection at a time, and writes down what came before it reads the next: so there
is one buffer, with the number of its connection.
"""

from __future__ import annotations

import mmap
import struct

READ_BYTES = 64 << 10  # of one connection, at once
_NUMBER = struct.Struct("=Q")


class Intake:
    """A buffer that this process shares with those that it forks later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBER.size + READ_BYTES)
        self._buffer = memoryview(self._memory)[_NUMBER.size :]

    def begin(self, number: int) -> memoryview:
        """Return the buffer, to read a connection into.

        Args:
            number: of the connection; 0 for one that is not kept.
        """
        _NUMBER.pack_into(self._memory, 0, number)
        return self._buffer

    def read(self, num_bytes: int) -> bytes:
        """Return what has come into the buffer."""
        return bytes(self._buffer[:num_bytes])

    def forget(self, num_bytes: int) -> None:
        """Have what came gone: it is written down, and nobody else's."""
        self._buffer[:num_bytes] = bytes(num_bytes)

    def last(self) -> tuple[int, bytes]:
        """Return the number of the connection that was read last, and the whole buffer. Behind what
        came with that are zeros; how much came, only the kernel knows.
        """
        return _NUMBER.unpack_from(self._memory)[0], bytes(self._buffer)
