"""SIGINT and SIGTERM, which are recorded and handled later."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Records the first SIGINT or SIGTERM; later ones must not cut the tear-down short.

    Attributes:
        received: its number; 0 before the first signal.
        on_first: called by the handler of the first signal, in the main thread; it may raise.
    """

    def __init__(self) -> None:
        self.received = 0
        self.on_first: Callable[[], None] | None = None
        # A handler may interrupt a wait that holds the lock of a threading.Event: setting the event
        # would then block for ever. Writing to a file descriptor does not.
        self._came = os.eventfd(0)

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._came)

    def take_over(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, for so many seconds at most; return whether one has come."""
        return bool(select.select([self._came], [], [], seconds)[0])

    def stop(self) -> None:
        """Act as if SIGTERM had come. Any thread."""
        self._record(signal.SIGTERM)

    def _record(self, number: int) -> None:
        self.received = self.received or number
        os.eventfd_write(self._came, 1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.received
        self._record(number)
        if is_first and self.on_first is not None:
            self.on_first()
