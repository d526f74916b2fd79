"""Choosing a deployment's buckets again while it serves, for the traffic that it sees."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.engine import SeenTraffic
from dist_aclgraph.actors.lockstep_group import LockstepGroup
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.rebucketing import Release, reunite
from dist_aclgraph.planning.traffic import TrafficHistory

ANSWER_S = 10.0


def _slowest(seen: Sequence[SeenTraffic]) -> dict[BatchDescriptor, float]:
    """Return for each graph the step time of the slowest group."""
    found: dict[BatchDescriptor, float] = {}
    for group in seen:
        for graph, seconds in group.step_seconds.items():
            found[graph] = max(seconds, found.get(graph, 0.0))
    return found


class TrafficWatch:
    """Owns the traffic seen by groups that share one plan, and asks them to change it."""

    def __init__(self, planner: Planner, groups: Sequence[LockstepGroup]) -> None:
        self._planner = planner
        self._groups = list(groups)
        self._history = TrafficHistory(planner.config.graph, time.monotonic())

    def add(self, groups: Sequence[LockstepGroup]) -> None:
        """Groups that are new: they come to the others' plan at the next look. Any thread."""
        self._groups = [*self._groups, *groups]

    def look(self, now_s: float) -> None:
        """Where it is time, take the traffic in, and move to a better plan if there is one.

        Groups that are still changing their plan are left alone; those that hold different ones,
        because a capture failed on some, come to one again.
        """
        if not self._history.is_due(now_s):
            return
        self._groups = [g for g in self._groups if not g.lost_because and not g.is_draining]
        if not self._groups:
            return
        try:
            asked = [group.engine.take_traffic.remote() for group in self._groups]
            seen: list[SeenTraffic] = ray.get(asked, timeout=ANSWER_S)
        except RayError:
            return  # the watcher will hear of it
        traffic = self._history.take([group.traffic for group in seen], now_s)
        plans = [group.plan for group in seen if group.plan is not None]
        if len(plans) < len(seen):
            return
        plan = plans[0]
        if any(other != plan for other in plans):
            self._reunite(plans)
            return
        offers = [offer for group in self._groups for offer in group.offers]
        change = self._planner.choose_again(plan, traffic, offers, _slowest(seen))
        if change is not None:
            for group in self._groups:
                group.engine.change_plan.remote(*change)

    def _reunite(self, plans: Sequence[GraphPlan]) -> None:
        common = reunite(plans)
        for group, plan in zip(self._groups, plans, strict=True):
            surplus = [g for g in plan.capture_order if g not in common.capture_order]
            group.engine.change_plan.remote(common, tuple(map(Release, surplus)))
