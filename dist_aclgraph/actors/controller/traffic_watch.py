"""Adapts the buckets of a serving deployment to the observed traffic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.engine.engine import SeenTraffic
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.rebucketing import Release, reunite
from dist_aclgraph.planning.traffic import TrafficHistory

# Seconds that a ``TrafficWatch`` waits for the answers of all groups. After this time, the watch
# uses only the answers that have arrived.
ANSWER_S = 10.0


def _slowest(seen: Sequence[SeenTraffic]) -> dict[BatchDescriptor, float]:
    """Return each graph's step time in seconds: the longest time that any group measured."""
    found: dict[BatchDescriptor, float] = {}
    for group in seen:
        for graph, seconds in group.step_seconds.items():
            found[graph] = max(seconds, found.get(graph, 0.0))
    return found


class TrafficWatch:
    """Records the traffic of groups that share one plan. If another plan is better, sends this plan
    to the groups.

    A watch never waits for a group: one call of ``look`` requests the traffic from the groups, and
    a later call collects the answers.
    """

    def __init__(self, planner: Planner, groups: Sequence[LockstepGroup]) -> None:
        self._planner = planner
        self._groups = list(groups)
        self._history = TrafficHistory(planner.config.graph, time.monotonic())
        self._asked: list[tuple[LockstepGroup, Any]] = []
        self._asked_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all groups of this watch were removed."""
        return not self._groups

    def add(self, groups: Sequence[LockstepGroup]) -> None:
        """Add groups. If the groups have different plans, a later call of ``look`` sends one common
        plan to all groups. Any thread may call this method.
        """
        self._groups = [*self._groups, *groups]

    def remove(self, group: LockstepGroup) -> None:
        """Remove a group. Any thread may call this method."""
        self._groups = [known for known in self._groups if known is not group]

    def look(self, now_s: float) -> None:
        """If a check is due, read the traffic. If another plan is better for this traffic, change
        to that plan.

        While a group is still changing its plan, no group gets a new plan. If the groups have
        different plans, e.g. after a failed capture, all groups get one common plan.
        """
        if not self._asked:
            groups = [g for g in self._groups if g.state is GroupState.SERVING]
            if groups and self._history.is_due(now_s):
                self._asked = [(group, group.engine.take_traffic.remote()) for group in groups]
                self._asked_s = now_s
            return
        refs = [ref for _, ref in self._asked]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if len(ready) < len(refs) and now_s - self._asked_s < ANSWER_S:
            return
        asked, self._asked = self._asked, []
        found = [(group, _answer(ref)) for group, ref in asked if ref in ready]
        answers = [(group, seen) for group, seen in found if seen is not None]
        self._choose(answers, len(asked), now_s)

    def _choose(
        self, answers: Sequence[tuple[LockstepGroup, SeenTraffic]], num_asked: int, now_s: float
    ) -> None:
        groups, seen = [group for group, _ in answers], [found for _, found in answers]
        traffic = self._history.record([group.traffic for group in seen], now_s)
        plans = [group.plan for group in seen if group.plan is not None]
        if len(plans) < num_asked:
            return
        plan = plans[0]
        if any(other != plan for other in plans):
            _reunite(groups, plans)
            return
        offers = [offer for group in groups for offer in group.offers]
        change = self._planner.choose_again(plan, traffic, offers, _slowest(seen))
        if change is not None:
            for group in groups:
                group.engine.change_plan.remote(*change)


class TrafficWatches:
    """Owns one watch for each scope. A scope is either all groups of one configuration, or a single
    group.
    """

    def __init__(self) -> None:
        self._watches: list[tuple[Planner, TrafficWatch]] = []

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, groups: Sequence[LockstepGroup]) -> None:
        """Watch new groups, which share one plan."""
        planner = groups[0].planner
        if planner.config.graph.scope == "cluster":
            for known, watch in self._watches:
                if known is planner:
                    watch.add(groups)
                    return
        self._watches = [*self._watches, (planner, TrafficWatch(planner, groups))]

    def remove(self, group: LockstepGroup) -> None:
        """Remove a group; remove its ``TrafficWatch`` if the watch has no other group."""
        for _, watch in self._watches:
            watch.remove(group)
        self._watches = [(p, watch) for p, watch in self._watches if not watch.is_over]

    def look(self, now_s: float) -> None:
        """Call ``TrafficWatch.look`` of all watches. Another thread may call ``add`` and ``remove``
        at the same time.
        """
        for _, watch in self._watches:
            watch.look(now_s)


def _reunite(groups: Sequence[LockstepGroup], plans: Sequence[GraphPlan]) -> None:
    common = reunite(plans)
    for group, plan in zip(groups, plans, strict=True):
        surplus = [g for g in plan.capture_order if g not in common.capture_order]
        group.engine.change_plan.remote(common, tuple(map(Release, surplus)))


def _answer(ref: Any) -> SeenTraffic | None:
    """Return an engine's answer; None if the engine has died."""
    try:
        answer: SeenTraffic = ray.get(ref)
        return answer
    except RayError:
        return None
