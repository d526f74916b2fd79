"""Choosing a deployment's buckets again while it serves, for the traffic that it sees."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.engine import SeenTraffic
from dist_aclgraph.actors.lockstep_group import LockstepGroup
from dist_aclgraph.config import Config
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget import BudgetModel
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.rebucketing import Release, choose_again, reunite
from dist_aclgraph.planning.traffic import Traffic, fade, merge

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

    def __init__(
        self,
        config: Config,
        groups: Sequence[LockstepGroup],
        families: Sequence[GraphFamily],
        budget_model: BudgetModel,
    ) -> None:
        self._config = config.graph
        self._groups = groups
        self._families = families
        self._budget_model = budget_model
        self._traffic = Traffic()
        self._looked_s = time.monotonic()

    def look(self, now_s: float) -> None:
        """Where it is time, take the traffic in, and move to a better plan if there is one.

        Groups that are still changing their plan are left alone; those that hold different ones,
        because a capture failed on some, come to one again.
        """
        elapsed_s = now_s - self._looked_s
        if not self._config.rebucket_s or elapsed_s < self._config.rebucket_s:
            return
        self._looked_s = now_s
        try:
            asked = [group.engine.take_traffic.remote() for group in self._groups]
            seen: list[SeenTraffic] = ray.get(asked, timeout=ANSWER_S)
        except RayError:
            return  # the watcher will hear of it
        faded = fade(self._traffic, elapsed_s, self._config.traffic_half_life_s)
        self._traffic = merge([faded, *(group.traffic for group in seen)])
        plans = [group.plan for group in seen if group.plan is not None]
        if len(plans) < len(seen):
            return
        plan = plans[0]
        if any(other != plan for other in plans):
            self._reunite(plans)
            return
        change = choose_again(
            plan,
            self._traffic,
            [offer for group in self._groups for offer in group.offers],
            _slowest(seen),
            self._families,
            self._budget_model,
            self._config,
        )
        if change is not None:
            for group in self._groups:
                group.engine.change_plan.remote(*change)

    def _reunite(self, plans: Sequence[GraphPlan]) -> None:
        common = reunite(plans)
        for group, plan in zip(self._groups, plans, strict=True):
            surplus = [g for g in plan.capture_order if g not in common.capture_order]
            group.engine.change_plan.remote(common, tuple(map(Release, surplus)))
