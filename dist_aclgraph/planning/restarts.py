"""Decides when a failed action is tried again, and how often lost processes are started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

HOUR_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
# The limit for a start is START_FACTOR times the duration of the slowest earlier start, but at
# least SHORTEST_START_S seconds.
START_FACTOR, SHORTEST_START_S = 5.0, 10.0


class Backoff:
    """Computes the pause between attempts of an action. The pause doubles after each failure, up to
    ``LONGEST_PAUSE_S``.

    All times must come from the same monotonic clock.

    Args:
        first_s: pause after the first failure, in seconds.
    """

    def __init__(self, first_s: float = FIRST_PAUSE_S) -> None:
        self._first_s = self._pause_s = first_s
        self._next_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Return how many seconds of the pause remain. Any thread may call this."""
        return max(0.0, self._next_s - now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last failure is over."""
        return self.pause_s(now_s) == 0.0

    def failed(self, now_s: float) -> None:
        """Record that an attempt has failed, so that the next attempt must wait."""
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def could_not_begin(self, now_s: float) -> None:
        """Record that an attempt could not begin, because resources were missing, or because
        another change was running.

        The next attempt follows after ``first_s`` seconds, even if a longer pause is not over. The
        missing resources can become available at any time.
        """
        self._next_s = now_s + self._first_s

    def succeeded(self) -> None:
        """Record that an attempt has succeeded. The next failure is treated as a first failure."""
        self._pause_s = self._first_s


class RestartBudget(Backoff):
    """Limits the number of restarts in an hour. Owns the times of past restarts.

    Args:
        per_hour: maximum number of restarts within any hour.
    """

    def __init__(self, per_hour: int) -> None:
        super().__init__()
        self.per_hour = per_hour
        self._taken_s: deque[float] = deque()

    def is_left(self, now_s: float) -> bool:
        """Whether a restart is allowed now. Any thread may call this."""
        return self.num_left(now_s) > 0

    def num_left(self, now_s: float) -> int:
        """Return how many restarts are allowed now. Any thread may call this."""
        return max(0, self.per_hour - len(self.ages_s(now_s)))

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """Return the age of each restart of the last hour, in seconds. Any thread may call this.

        From these ages, a process with another clock can make a copy of the budget.
        """
        taken_s = tuple(self._taken_s)
        return tuple(now_s - each_s for each_s in taken_s if each_s > now_s - HOUR_S)

    def adopt(self, ages_s: Sequence[float], now_s: float) -> None:
        """Forget the restarts that this budget has counted. Instead, count one restart for each age
        in ``ages_s``; see the method ``ages_s``.
        """
        self._taken_s = deque(now_s - age_s for age_s in ages_s)

    def spend(self, now_s: float) -> bool:
        """Return whether a restart is allowed. Count the restart if it is allowed."""
        while self._taken_s and self._taken_s[0] <= now_s - HOUR_S:
            self._taken_s.popleft()
        if not self.is_left(now_s):
            return False
        self._taken_s.append(now_s)
        return True

    def give_back(self) -> None:
        """Remove the oldest restart from the count. Call this when a restarted process has served
        long enough.
        """
        if self._taken_s:
            self._taken_s.popleft()


class StartLimit:
    """Computes a time limit for starting a group's processes, from the durations of earlier starts.

    Ray does not report the death of a process that has not registered with Ray yet. So only a time
    limit detects such a death. A busy machine can make a start slow. So the limit doubles each time
    a start exceeds the limit.

    Attributes:
        slowest_s: duration of the slowest earlier start, in seconds; None if no start has
            succeeded.
    """

    def __init__(self, slowest_s: float | None = None) -> None:
        self.slowest_s = slowest_s
        self._num_exceeded = 0

    def seconds(self, longest_s: float) -> float:
        """Return the limit for the next start, in seconds; ``longest_s`` if no start has succeeded
        yet.
        """
        if self.slowest_s is None:
            return longest_s
        usual_s = max(SHORTEST_START_S, START_FACTOR * self.slowest_s)
        return min(longest_s, usual_s * float(2**self._num_exceeded))

    def note(self, took_s: float) -> None:
        """Record how many seconds a successful start took."""
        self.slowest_s = max(self.slowest_s or 0.0, took_s)
        self._num_exceeded = 0

    def exceeded(self) -> None:
        """Record that the processes of a start were not ready within the limit."""
        self._num_exceeded += 1
