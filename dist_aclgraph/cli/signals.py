"""SIGINT and SIGTERM, remembered instead of obeyed at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Remembers the first SIGINT or SIGTERM; the next ones must not cut the tear-down short.

    Attributes:
        received: its number, 0 before it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._came = threading.Event()

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_over(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def wait(self, seconds: float) -> bool:
        """Return whether one has come, after so many seconds at the latest."""
        return self._came.wait(seconds)

    def stop(self) -> None:
        """Be as if one had come."""
        self.received = self.received or signal.SIGTERM
        self._came.set()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._came.set()
