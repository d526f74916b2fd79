"""A place that is held for as long as whoever gave it asks for a sign of life, again and again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from dist_aclgraph.actors.wire.sockets import Silence

LOOKS_OF_A_LIMIT = 20

logger = logging.getLogger(__name__)


class Lease:
    """Whether its holder may act. Begins with the first question; all methods: any thread.

    Questions are numbered, and the next one is asked once the last was answered. Where none has
    come for ``limit_s``, the lease is not held, and its holder does nothing; after as long again it
    is over. Who was stopped cannot know what has become of the place meanwhile: a question that may
    have been asked before renews nothing, the next one does.

    Attributes:
        is_given_back: see ``give_back``.

    Args:
        clock: in seconds; does not go back.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.look_s = limit_s / LOOKS_OF_A_LIMIT
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen_s = self._looked_s = clock()
        self._renewed_s: float | None = None
        self._number = 0  # of the last question
        self._counts_from = 0  # the first question that renews
        self.is_given_back = False
        # Its holder's own stops do not end it: who gave the place decides.
        self._silence = Silence(2 * limit_s, 2 * self.look_s)

    def renew(self, number: int) -> None:
        """Answer a question."""
        with self._lock:
            now_s = self._see()
            self._number = number
            if number >= self._counts_from:
                self._renewed_s = now_s
                self._silence.heard()

    def is_held(self) -> bool:
        with self._lock:
            now_s = self._see()
            return self._renewed_s is None or now_s - self._renewed_s <= self._limit_s

    def give_back(self) -> None:
        """Its holder acts no more by it: from now on it is never over."""
        self.is_given_back = True

    def look(self) -> bool:
        """Return whether the lease is over; for one thread, every ``look_s``."""
        with self._lock:
            now_s = self._see()
            elapsed_s, self._looked_s = now_s - self._looked_s, now_s
            if self._renewed_s is None or self.is_given_back:
                return False
            return self._silence.listen(elapsed_s)

    def _see(self) -> float:
        """Return the time, and find out whether this process was stopped until now."""
        now_s = self._clock()
        if now_s - self._seen_s > self._limit_s:
            self._counts_from = self._number + 2  # the next one may have waited here for us
        self._seen_s = now_s
        return now_s


def leave_with(lease: Lease, who: str) -> None:
    """End this process once the lease is over; from a thread of its own."""

    def watch() -> None:
        while not lease.look():
            if lease.is_given_back:
                return
            time.sleep(lease.look_s)
        logger.error("the controller has not asked for %s for too long: it ends itself", who)
        os._exit(1)

    threading.Thread(target=watch, name="lease", daemon=True).start()
