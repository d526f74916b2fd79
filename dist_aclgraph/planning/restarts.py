"""How often, and when, a failed action is tried again, and a lost object is started again."""

from __future__ import annotations

from collections import deque

HOUR_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


class Backoff:
    """Owns the pause between attempts: it doubles after each failure, up to ``LONGEST_PAUSE_S``.

    All times are of one monotonic clock.

    Args:
        first_s: the pause after the first failure.
    """

    def __init__(self, first_s: float = FIRST_PAUSE_S) -> None:
        self._first_s = self._pause_s = first_s
        self._next_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Return the rest of the pause after the last failure; any thread may call it."""
        return max(0.0, self._next_s - now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over."""
        return self.pause_s(now_s) == 0.0

    def failed(self, now_s: float) -> None:
        """Note that an attempt failed, or could not begin: the next one waits."""
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """Reset: the next failure counts as the first."""
        self._pause_s = self._first_s


class RestartBudget(Backoff):
    """Counts restarts, which are limited per hour. Owns their times.

    Args:
        per_hour: limit of restarts within any hour.
    """

    def __init__(self, per_hour: int) -> None:
        super().__init__()
        self.per_hour = per_hour
        self._taken_s: deque[float] = deque()

    def is_left(self, now_s: float) -> bool:
        """Whether a restart is allowed; any thread may call it."""
        return sum(taken_s > now_s - HOUR_S for taken_s in tuple(self._taken_s)) < self.per_hour

    def spend(self, now_s: float) -> bool:
        """Count a restart, if one is allowed; return whether it was."""
        while self._taken_s and self._taken_s[0] <= now_s - HOUR_S:
            self._taken_s.popleft()
        if not self.is_left(now_s):
            return False
        self._taken_s.append(now_s)
        return True
