"""How many groups a deployment should have for the requests that it has: a rule with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import AutoscaleConfig


@dataclass(frozen=True)
class Demand:
    """What the groups that take requests have to do.

    Attributes:
        groups: of them, 1 or more.
        running, waiting: requests in all of them.
        rows: requests that one group can run at once.
        missing: groups that there should be beside them.
    """

    groups: int
    running: int
    waiting: int
    rows: int
    missing: int = 0


@dataclass
class Autoscaler:
    """Owns since when there has been too much or too little to do.

    One group more, once more than ``target_waiting`` requests have waited for each group all
    through ``up_s``. One less, once nobody has waited all through ``down_s``, while what ran would
    have filled half of the other groups at most: so the others have room, and nobody waits at once.
    """

    config: AutoscaleConfig
    _busy_since_s: float | None = None
    _idle_since_s: float | None = None

    def decide(self, now_s: float, demand: Demand) -> int:
        """Return how many groups there should be, those that are missing left out."""
        config, groups = self.config, demand.groups
        is_busy = demand.waiting > config.target_waiting * groups
        is_idle = not demand.waiting and 2 * demand.running <= (groups - 1) * demand.rows
        self._busy_since_s = _since(self._busy_since_s, is_busy, now_s)
        self._idle_since_s = _since(self._idle_since_s, is_idle, now_s)
        if self._busy_since_s is not None and now_s - self._busy_since_s >= config.up_s:
            groups, self._busy_since_s = groups + 1, None
        elif self._idle_since_s is not None and now_s - self._idle_since_s >= config.down_s:
            groups, self._idle_since_s = groups - 1, None
        wanted = min(max(groups, config.min_groups), config.max_groups)
        # What is missing is replaced, as often as that is allowed: it is not asked for once more.
        is_missing = demand.groups < wanted <= demand.groups + demand.missing
        return demand.groups if is_missing else wanted


def _since(before_s: float | None, is_so: bool, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if before_s is None else before_s
