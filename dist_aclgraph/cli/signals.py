"""SIGINT and SIGTERM, which are recorded and handled later."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Records the first SIGINT or SIGTERM; later ones must not cut the tear-down short.

    Attributes:
        received: its number; 0 before the first signal.
    """

    def __init__(self) -> None:
        self.received = 0
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
        self._receive(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        os.eventfd_write(self._came, 1)
