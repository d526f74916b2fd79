"""Decides how many groups a deployment needs.

The load at which groups are added is higher than the load at which groups are removed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import AutoscaleConfig


@dataclass(frozen=True)
class Demand:
    """The load of all groups that accept requests, counted together.

    Attributes:
        groups: number of these groups, 1 or more.
        running, waiting: number of running requests, and number of waiting requests, in all of
            these groups.
        rows: number of requests that one group can run at the same time.
        missing: number of groups that were lost, and will be replaced.
    """

    groups: int
    running: int
    waiting: int
    rows: int
    missing: int = 0


@dataclass
class Autoscaler:
    """Records since when the load has been too high or too low.

    One group is added if more than ``target_waiting`` requests per group were waiting at all times
    during the last ``up_s`` seconds. One group is removed if, during the last ``down_s``, two
    conditions were true at all times: no request was waiting, and the running requests would have
    filled at most half of the rows of the remaining groups. So after the removal, the remaining
    groups can run all requests at the same time.
    """

    config: AutoscaleConfig
    _busy_since_s: float | None = None
    _idle_since_s: float | None = None

    def decide(self, now_s: float, demand: Demand) -> int:
        """Return how many groups are wanted. The groups that will replace lost groups are not
        included.
        """
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
        # The controller replaces lost groups, as long as the restart budget allows this. So the
        # autoscaler does not add groups to replace lost groups.
        is_missing = demand.groups < wanted <= demand.groups + demand.missing
        return demand.groups if is_missing else wanted


def _since(before_s: float | None, is_so: bool, now_s: float) -> float | None:
    if not is_so:
        return None
    return now_s if before_s is None else before_s
