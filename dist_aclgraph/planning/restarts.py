"""Decides when to try a failed action again, and how often to start a lost process again."""

from __future__ import annotations

from collections import deque

HOUR_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


class Backoff:
    """Owns the pause between attempts. The pause doubles after each failure, up to
    ``LONGEST_PAUSE_S``.

    All times must come from the same monotonic clock.

    Args:
        first_s: the pause after the first failure.
    """

    def __init__(self, first_s: float = FIRST_PAUSE_S) -> None:
        self._first_s = self._pause_s = first_s
        self._next_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Return the remaining seconds of the pause; any thread may call this."""
        return max(0.0, self._next_s - now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over."""
        return self.pause_s(now_s) == 0.0

    def failed(self, now_s: float) -> None:
        """Note that an attempt failed; the next attempt must wait."""
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def could_not_begin(self, now_s: float) -> None:
        """Note that an attempt found no place, or another change was running.

        The next attempt follows soon, whatever the pause, because the reason may end at any time.
        """
        self._next_s = now_s + self._first_s

    def succeeded(self) -> None:
        """Note that an attempt succeeded; the next failure counts as the first one."""
        self._pause_s = self._first_s


class RestartBudget(Backoff):
    """Limits the number of restarts per hour. Owns the times of restarts.

    Args:
        per_hour: maximum number of restarts within any hour.
    """

    def __init__(self, per_hour: int) -> None:
        super().__init__()
        self.per_hour = per_hour
        self._taken_s: deque[float] = deque()

    def is_left(self, now_s: float) -> bool:
        """Whether a restart is allowed now; any thread may call this."""
        return sum(taken_s > now_s - HOUR_S for taken_s in tuple(self._taken_s)) < self.per_hour

    def spend(self, now_s: float) -> bool:
        """If a restart is allowed, count it; return whether it is allowed."""
        while self._taken_s and self._taken_s[0] <= now_s - HOUR_S:
            self._taken_s.popleft()
        if not self.is_left(now_s):
            return False
        self._taken_s.append(now_s)
        return True
