"""Planner: computes a deployment's graph plans from its configuration, its model, and the resources
that its ranks offer for graphs.

In a deployment, the ranks send these offers to the controller. The commands ``plan`` and
``simulate`` run without ranks, and use assumed offers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.planning.buckets import GraphFamily, candidate_families, lazy_families
from dist_aclgraph.planning.budget import BudgetModel, StreamOffer, Workload, make_budget_model
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.ledger import pool_bytes
from dist_aclgraph.planning.modes import with_possible_mode
from dist_aclgraph.planning.negotiation import fit_memory, keep_room, negotiate
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.rebucketing import Action, choose_again
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.servable import read_servable_spec
from dist_aclgraph.topology import ParallelLayout


@dataclass(frozen=True)
class NegotiatedPlan:
    """A plan, and the offers from which it was chosen.

    Attributes:
        offers: the offers of all ranks. The attribute ``reserve`` of each offer includes the
            streams for lazy graphs.
        lazy_capacity: number of lazy graphs for which streams are reserved.
    """

    plan: GraphPlan
    offers: list[StreamOffer]
    lazy_capacity: int


@dataclass(frozen=True)
class Planner:
    """Makes plans for one configuration. This class knows nothing about devices.

    Attributes:
        config: the configuration with a supported graph mode.
        mode_reasons: the reasons for which the graph mode differs from the configured mode; empty
            if it does not differ.
        cache_spec: the shape of one rank's KV cache.
        max_model_len: maximum length of a request.
        families: the graphs that are captured before the group serves, if every rank has enough
            streams and memory.
        lazy_families: the graphs that may be captured while the group serves.
    """

    config: Config
    mode_reasons: tuple[str, ...]
    facts: ModelSpec
    layout: ParallelLayout
    budget_model: BudgetModel
    cache_spec: KVCacheSpec
    max_model_len: int
    families: tuple[GraphFamily, ...]
    lazy_families: tuple[GraphFamily, ...]

    @classmethod
    def from_config(cls, config: Config, *, launch_blocking: bool = False) -> Planner:
        """Read the model's shape, and check that the configuration can serve the model.

        Raises:
            ConfigError, ModelError: the configuration cannot serve the model. The message names the
                key or the file, and the remedy.
        """
        facts = read_servable_spec(config)
        config, reasons = with_possible_mode(config, facts, launch_blocking=launch_blocking)
        max_model_len, context = facts.max_model_len(config), facts.context_len
        if max_model_len > context:
            raise ConfigError(
                f"max_model_len is {max_model_len}; the model's context is {context} tokens"
            )
        return cls(
            config,
            reasons,
            facts,
            ParallelLayout.from_config(config.parallel),
            make_budget_model(config.graph.budget_model, Workload.from_config(config, facts)),
            KVCacheSpec.from_config(config, facts),
            max_model_len,
            candidate_families(config),
            lazy_families(config),
        )

    @property
    def largest_graphs(self) -> list[BatchDescriptor]:
        """The largest graph of each family. A graph that is the largest of two families is listed
        once. The graphs of lazy families come last.
        """
        max_num_seqs = self.config.scheduler.max_num_seqs
        families = (*self.families, *self.lazy_families)
        return list(
            dict.fromkeys(family.describe(family.buckets[-1], max_num_seqs) for family in families)
        )

    def negotiate(self, offers: Sequence[StreamOffer]) -> NegotiatedPlan:
        """Choose one plan for the offers of all ranks, and reserve streams for lazy graphs.

        Raises:
            StreamBudgetError: a rank has too few streams or bytes for a single bucket.
        """
        # If several offers differ only in their ranks, only the first offer is used. The others
        # would set the same limits.
        first_of = {content_of(offer): offer for offer in reversed(offers)}
        kept, capacity = keep_room(
            list(first_of.values()),
            self.lazy_families,
            self.config.graph.lazy_capacity,
            self.budget_model,
        )
        plan = negotiate(
            kept,
            self.families,
            self.budget_model,
            traffic=Traffic.from_config(self.config.graph),
            max_num_seqs=self.config.scheduler.max_num_seqs,
        )
        plan = msgspec.structs.replace(plan, reasons=(*plan.reasons, *self._reach()))
        reserve_of = {key: offer.reserve for key, offer in zip(first_of, kept, strict=True)}
        return NegotiatedPlan(
            plan,
            [
                msgspec.structs.replace(offer, reserve=reserve_of[content_of(offer)])
                for offer in offers
            ],
            capacity,
        )

    def reserved_bytes(self, plan: GraphPlan, offers: Sequence[StreamOffer]) -> dict[int, int]:
        """Return, for each rank, how many bytes the plan's graphs and the lazy graphs together
        need.

        Args:
            offers: all offers from which the plan was chosen.
        """
        # No memory is reserved for lazy graphs that are too large for the free memory. Reserving
        # memory for such graphs would leave no memory for the cache.
        lazy, _ = fit_memory(self.lazy_families if plan.families else (), offers, self.budget_model)
        everything = msgspec.structs.replace(plan, families=(*plan.families, *lazy))
        return {offer.rank: pool_bytes(everything, offer, self.budget_model) for offer in offers}

    def choose_again(
        self,
        plan: GraphPlan,
        traffic: Traffic,
        offers: Sequence[StreamOffer],
        step_seconds: Mapping[BatchDescriptor, float],
    ) -> tuple[GraphPlan, tuple[Action, ...]] | None:
        """Return a plan that is better for the traffic, and the actions that lead to it; None if
        there is no better plan.

        Args:
            offers: the offers from which ``plan`` was chosen. The ranks made these offers before
                any capture.
            step_seconds: for each graph, the measured time of a step that replays it, in seconds.
        """
        return choose_again(
            plan,
            traffic,
            offers,
            step_seconds,
            self.families,
            self.budget_model,
            self.config.graph,
        )

    def _reach(self) -> list[str]:
        """Return sentences that name the decode batches that run eagerly, because no graph is large
        enough for them.

        Mixed batches are not mentioned, because users expect that prompts run eagerly.
        """
        query_len = self.config.speculative.num_tokens + 1
        largest = self.config.scheduler.max_num_seqs * query_len
        return [
            f"decode batches above {family.buckets[-1]} tokens, up to {largest}, run eagerly: see "
            "graph.sizes and graph.max_tokens"
            for family in self.families
            if family.query_len and family.buckets[-1] < largest
        ]


def content_of(offer: StreamOffer) -> bytes:
    """Return the encoded fields of an offer, without the rank.

    Equal fields have equal encodings.
    """
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, rank=0))
