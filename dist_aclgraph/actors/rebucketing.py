"""Choosing a deployment's buckets again while it serves, for the traffic that it sees."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.lockstep_group import LockstepGroup
from dist_aclgraph.config import Config
from dist_aclgraph.graph.buckets import GraphFamily
from dist_aclgraph.graph.budget import BudgetModel, Workload
from dist_aclgraph.graph.plan import GraphPlan
from dist_aclgraph.graph.rebucketing import propose, transition
from dist_aclgraph.graph.traffic import Traffic, fade, merge
from dist_aclgraph.model_facts import ModelFacts

ANSWER_S = 10.0


class Rebucketing:
    """Owns the traffic seen by groups that share one plan, and asks them to change it."""

    def __init__(
        self,
        config: Config,
        groups: Sequence[LockstepGroup],
        families: Sequence[GraphFamily],
        budget_model: BudgetModel,
        facts: ModelFacts,
    ) -> None:
        self._config = config.graph
        self._groups = groups
        self._families = families
        self._budget_model = budget_model
        self._workload = Workload.from_config(config, facts)
        self._traffic = Traffic()
        self._looked_s = time.monotonic()

    def look(self, now_s: float) -> None:
        """Where it is time, take the traffic in, and move to a better plan if there is one.

        Groups that hold different plans, or are still changing theirs, are left alone.
        """
        elapsed_s = now_s - self._looked_s
        if not self._config.rebucket_s or elapsed_s < self._config.rebucket_s:
            return
        self._looked_s = now_s
        try:
            answers = ray.get([g.engine.take_traffic.remote() for g in self._groups],
                              timeout=ANSWER_S)  # fmt: skip
        except RayError:
            return  # the watcher will hear of it
        faded = fade(self._traffic, elapsed_s, self._config.traffic_half_life_s)
        self._traffic = merge([faded, *(traffic for _, traffic in answers)])
        plan: GraphPlan | None = answers[0][0]
        if plan is None or any(other != plan for other, _ in answers):
            return
        offers = [offer for group in self._groups for offer in group.offers]
        model, workload = self._budget_model, self._workload
        better = propose(
            plan,
            self._traffic,
            offers,
            self._families,
            model,
            workload,
            min_gain=self._config.rebucket_gain,
        )
        if better is not None:
            actions = transition(plan, better, offers, model, workload)
            for group in self._groups:
                group.engine.change_plan.remote(better, actions)
