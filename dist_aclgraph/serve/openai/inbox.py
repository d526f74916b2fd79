"""Passes deltas from the engine client's thread to the event loop, and requests from the event loop
to the engine client's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from dist_aclgraph.steps.delta import RequestDelta

# A function that is called with a delta, and with the time on the monotonic clock.
Take = Callable[[RequestDelta, float], None]


class Inbox:
    """Wakes the event loop once for all deltas of a step. Deltas need no asyncio task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[Take, RequestDelta]] = deque()
        self._is_called = False

    def put(self, take: Take, delta: RequestDelta) -> None:
        """Call ``take`` with ``delta`` on the event loop. Deltas arrive there in the order of the
        calls of ``put``.

        The engine client's thread calls this. ``take`` must not raise.
        """
        self._arrived.append((take, delta))
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        # Clear this flag first: a delta that arrives after this line needs another wake-up.
        self._is_called = False
        now_s = time.monotonic()
        for _ in range(len(self._arrived)):
            take, delta = self._arrived.popleft()
            take(delta, now_s)


class Outbox:
    """Wakes the engine client's thread once for all requests that one turn of the loop submits.

    After each wake-up, the loop waits until the thread releases Python's global lock. If each of
    many requests caused a wake-up, the last request would be delayed.

    Args:
        wake: wakes the thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._is_called = False

    def note(self) -> None:
        """Wake the thread when the loop has run the callbacks that are ready now. The loop calls
        this.
        """
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        self._is_called = False
        self._wake()
