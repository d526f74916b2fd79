"""SIGINT and SIGTERM, remembered instead of obeyed at once."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Remembers the first SIGINT or SIGTERM; the next ones must not cut the tear-down short.

    Attributes:
        received: its number, 0 before it.
    """

    def __init__(self) -> None:
        self.received = 0
        # A handler interrupts whoever waits, wherever that stands. It may write to a file; the lock
        # of a threading.Event, which the interrupted wait may hold, would never be free again.
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
        """Return whether one has come, after so many seconds at the latest."""
        return bool(select.select([self._came], [], [], seconds)[0])

    def stop(self) -> None:
        """Be as if one had come. Any thread."""
        self._receive(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        os.eventfd_write(self._came, 1)
