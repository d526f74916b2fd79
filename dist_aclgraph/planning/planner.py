"""Planner: everything about a deployment's graph plans that follows from configuration and model.

The controller gets offers from ranks; ``plan`` and ``simulate`` assume offers. All of them then use
the code here.
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
from dist_aclgraph.shapes.model_facts import ModelFacts, check_model, read_model_facts
from dist_aclgraph.topology import ParallelLayout


@dataclass(frozen=True)
class NegotiatedPlan:
    """A plan, the offers behind it with room for lazy graphs, and the number of lazy graphs."""

    plan: GraphPlan
    offers: list[StreamOffer]
    lazy_capacity: int


@dataclass(frozen=True)
class Planner:
    """Plans for one configuration. Knows no device.

    Attributes:
        config: with a supported graph mode; ``mode_reasons`` has the reasons of changes.
        cache_spec: the KV cache of one rank.
        max_model_len: the longest request that the configuration allows.
        families: graphs that are captured if every rank can afford them.
        lazy_families: graphs that may be captured while serving.
    """

    config: Config
    mode_reasons: tuple[str, ...]
    facts: ModelFacts
    layout: ParallelLayout
    budget_model: BudgetModel
    cache_spec: KVCacheSpec
    max_model_len: int
    families: tuple[GraphFamily, ...]
    lazy_families: tuple[GraphFamily, ...]

    @classmethod
    def from_config(cls, config: Config, *, launch_blocking: bool = False) -> Planner:
        """Read the model's facts, and check that the configuration can serve the model.

        Raises:
            ConfigError, ModelError: it cannot; the message has the key or file, and the remedy.
        """
        facts = read_model_facts(config.model)
        check_model(config, facts)
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
        """The largest graph of each kind; among equal kinds, that of the first family."""
        max_num_seqs = self.config.scheduler.max_num_seqs
        families = (*self.families, *self.lazy_families)
        return list(
            dict.fromkeys(family.describe(family.buckets[-1], max_num_seqs) for family in families)
        )

    def negotiate(self, offers: Sequence[StreamOffer]) -> NegotiatedPlan:
        """Negotiate one plan over offers, with room for lazy graphs.

        Raises:
            StreamBudgetError: a rank cannot afford a single bucket.
        """
        # Ranks with the same offer limit a plan equally: the first of them represents all.
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
        """Return by rank the memory of a plan's graphs, and of lazy ones.

        Args:
            offers: all offers of the plan's negotiation.
        """
        # Keep no room for graphs that do not fit now; it would leave none for the cache.
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
        """Return a plan that serves the traffic better, and the changes that lead to it; or None.

        Args:
            offers: the offers of ``plan``'s negotiation, before anything was captured.
            step_seconds: measured time of steps by replayed graph.
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
        """Return which decode batches run eagerly: those above the configured sizes, or above the
        largest graph.

        Mixed batches are omitted: they contain prompts, which users expect to run eagerly.
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
    """Return the properties that equal offers of two ranks share."""
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, rank=0))
