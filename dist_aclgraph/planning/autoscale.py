"""The number of groups for a deployment's requests: a rule with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import AutoscaleConfig


@dataclass(frozen=True)
class Demand:
    """The load of the groups that accept requests.

    Attributes:
        groups: number of these groups, 1 or more.
        running, waiting: requests in all of them.
        rows: requests that one group can run at once.
        missing: lost groups, which are replaced.
    """

    groups: int
    running: int
    waiting: int
    rows: int
    missing: int = 0


@dataclass
class Autoscaler:
    """Owns the time since which the load has been too high or too low.

    One group is added once more than ``target_waiting`` requests per group have waited during all
    of ``up_s``. One is removed once no request has waited during all of ``down_s``, while the
    running requests would have filled at most half of the other groups. So the other groups have
    room, and no request has to wait afterwards.
    """

    config: AutoscaleConfig
    _busy_since_s: float | None = None
    _idle_since_s: float | None = None

    def decide(self, now_s: float, demand: Demand) -> int:
        """Return the wanted number of groups, without the lost ones."""
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
        # Lost groups are replaced, as often as that is allowed; do not request them a second time.
        is_missing = demand.groups < wanted <= demand.groups + demand.missing
        return demand.groups if is_missing else wanted


def _since(before_s: float | None, is_so: bool, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if before_s is None else before_s
