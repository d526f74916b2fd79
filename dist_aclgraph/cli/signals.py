"""Records the signals that stop a service, so that the main thread can handle them later."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import FrameType

# SIGHUP arrives when the terminal is closed. ``nohup`` makes a process ignore SIGHUP.
_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGUP)


class Signals:
    """Records the first signal that stops a service. Ignores later signals, which must not
    interrupt the stop.

    Attributes:
        received: number of the first signal; 0 until a signal arrives.
        on_first: a function that the handler of the first signal calls in the main thread. It may
            raise an error.
    """

    def __init__(self) -> None:
        self.received = 0
        self.on_first: Callable[[], None] | None = None
        # A handler can interrupt ``wait``. If ``wait`` used a threading.Event, it could hold the
        # event's lock, and the handler's ``set`` would block forever. A write to an eventfd does
        # not block.
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
        """Wait at most ``seconds`` for a signal; return whether a signal has arrived."""
        return bool(select.select([self._came], [], [], seconds)[0])

    def stop(self) -> None:
        """Act as if SIGTERM had arrived. Any thread may call this."""
        self._record(signal.SIGTERM)

    def _record(self, number: int) -> None:
        self.received = self.received or number
        os.eventfd_write(self._came, 1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.received
        self._record(number)
        if is_first and self.on_first is not None:
            self.on_first()
