"""The sign of life that a process gives to the one that has started it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BEAT_S = 1.0  # between two signs of a process that is starting
_REST, _FIRST = 0, 1
_LAST = 255


class Pulse:
    """A byte that both processes share: one changes it all the time, the other looks now and then.

    Looks are counted, and no time: what was stopped together with who looks is not silent.
    To be made before the process is forked, by whoever looks.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 2)  # the byte, and whether it serves
        self._seen, self._num_silent = _REST, 0

    def beat(self, *, serves: bool = True) -> None:
        """Give a sign. Others are expected from now on."""
        self._shared[0] = self._shared[0] % _LAST + 1
        self._shared[1] |= serves

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Give signs from a thread as long as this lasts, which sets itself limits; behind it, have
        none expected until the next.
        """
        has_ended = threading.Event()

        def run() -> None:
            while not has_ended.wait(BEAT_S):
                self.beat(serves=False)

        self.beat(serves=False)
        thread = threading.Thread(target=run, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self.rest()

    def rest(self) -> None:
        """Have none expected until the next."""
        self._shared[0] = _REST

    def begin(self) -> None:
        """Be the pulse of another process, which is about to be forked: its first sign is expected
        like all others.
        """
        self._shared[:] = bytes([_FIRST, False])
        self._seen, self._num_silent = _REST, 0

    @property
    def has_served(self) -> bool:
        """Whether the process has given a sign that it serves."""
        return bool(self._shared[1])

    def look(self) -> int:
        """Return how many looks in a row, up to this one, have seen nothing that was expected."""
        now = self._shared[0]
        is_silent = now != _REST and now == self._seen
        self._seen = now
        self._num_silent = self._num_silent + 1 if is_silent else 0
        return self._num_silent
