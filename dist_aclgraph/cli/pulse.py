"""The sign of life that a process gives to the one that has started it."""

from __future__ import annotations

import mmap

_REST = 0
_LAST = 255


class Pulse:
    """A byte that both processes share: one changes it all the time, the other looks now and then.

    Looks are counted, and no time: what was stopped together with who looks is not silent.
    To be made before the process is forked, by whoever looks.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 2)  # the byte, and whether it has changed since ``begin``
        self._seen, self._num_silent = _REST, 0

    def beat(self) -> None:
        """Give a sign; from the first one on they are expected."""
        self._shared[0] = self._shared[0] % _LAST + 1
        self._shared[1] = 1

    def rest(self) -> None:
        """Have none expected until the next."""
        self._shared[0] = _REST

    def begin(self) -> None:
        """Be the pulse of another process, which is about to be forked."""
        self._shared[:] = bytes(2)
        self._seen, self._num_silent = _REST, 0

    @property
    def was_felt(self) -> bool:
        """Whether the process has given a sign."""
        return bool(self._shared[1])

    def look(self) -> int:
        """Return how many looks in a row, up to this one, have seen nothing that was expected."""
        now = self._shared[0]
        is_silent = now != _REST and now == self._seen
        self._seen = now
        self._num_silent = self._num_silent + 1 if is_silent else 0
        return self._num_silent
