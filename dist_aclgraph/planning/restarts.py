"""How often what was lost is started again: a number within each hour."""

from __future__ import annotations

from collections import deque

HOUR_S = 3600.0


class RestartBudget:
    """Counts restarts. Owns their times.

    Args:
        per_hour: those that are allowed within any hour.
    """

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._taken_s: deque[float] = deque()

    def take(self, now_s: float) -> bool:
        """Count a restart, if one is left; return whether it was.

        Args:
            now_s: of a clock that does not go back.
        """
        while self._taken_s and self._taken_s[0] <= now_s - HOUR_S:
            self._taken_s.popleft()
        if len(self._taken_s) >= self.per_hour:
            return False
        self._taken_s.append(now_s)
        return True
