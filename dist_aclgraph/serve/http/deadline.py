"""Limits the time for which the server waits for a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ClientDeadline:
    """Owns one timer, which calls ``on_overdue`` after the deadline has passed.

    A later deadline does not change the timer. If the timer fires before the deadline, the timer is
    set again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_overdue: Callable[[], None]) -> None:
        self._loop = loop
        self._on_overdue = on_overdue
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def set(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now."""
        self._due_s = self._loop.time() + seconds
        if self._timer is None or self._due_s < self._timer_s:
            self._wind_up(self._due_s)

    def shorten(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now if this is earlier than the present deadline."""
        if self._due_s is None or self._loop.time() + seconds < self._due_s:
            self.set(seconds)

    def clear(self) -> None:
        self._due_s = None

    def close(self) -> None:
        """Remove the deadline and cancel the timer."""
        self._due_s = None
        if self._timer is not None:
            self._timer.cancel()

    def _wind_up(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = self._loop.call_at(at_s, self._ring), at_s

    def _ring(self) -> None:
        self._timer = None
        if self._due_s is not None:
            if self._due_s > self._timer_s:
                self._wind_up(self._due_s)
            else:
                self._on_overdue()
