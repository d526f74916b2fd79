"""Budget models: the price of a bucket on a rank, and how many buckets its offer pays for.

A model knows nothing of negotiation; ``graph/negotiation.py`` asks it about every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dist_aclgraph.config import BudgetModelName, Config, GraphMode
from dist_aclgraph.graph.budget.formula import (
    CONTEXT_PARALLEL_STREAMS,
    GROUP_STREAMS,
    LEGACY_STREAMS,
    LegacyInputs,
    Variant,
)
from dist_aclgraph.model_facts import ModelFacts

LEGACY_VARIANTS: dict[BudgetModelName, Variant] = {
    "legacy-0.11": "v0.11",
    "legacy-0.13": "v0.13",
    "legacy-0.20": "v0.20",
    "legacy-last": "last",
}


class StreamOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can give to graphs; it travels from worker to controller."""

    rank: int  # world rank
    available: int  # streams that the device still has
    reserve: int = 0  # of these, streams that no graph may take
    free_bytes: int = 1 << 62  # device memory that graphs may take
    device: str = ""  # name of the chip
    taken: dict[str, int] = {}  # streams gone before the offer, by who took them
    max_sizes: int | None = None  # most buckets that the device's driver takes, if limited

    @property
    def usable(self) -> int:
        return max(0, self.available - self.reserve)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is captured on every rank: the model's and the configuration's share of the price.

    Attributes:
        num_layers: hidden layers of the main model.
        mode: which graphs a bucket needs.
        draft_layers: layers of the draft model, 0 where there is none.
        aiv: HCCL expands collectives on vector cores.
        num_candidates: sizes that are wished for; ``legacy-last`` sets a stream aside for each.
        bytes_per_token: device memory that a graph takes per token of its bucket; the pool is
            shared, so that all graphs together take what the largest one does.
    """

    num_layers: int
    mode: GraphMode = "FULL_DECODE_ONLY"
    moe: bool = False
    tp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: int = 1
    aiv: bool = False
    multistream_shared: bool = False
    draft_layers: int = 0
    query_len: int = 1
    num_candidates: int = 0
    bytes_per_token: int = 0

    @classmethod
    def from_config(cls, config: Config, facts: ModelFacts) -> Workload:
        parallel = config.parallel
        return cls(
            num_layers=facts.num_layers,
            mode=config.graph.mode,
            moe=facts.moe,
            tp=parallel.tp,
            dp=parallel.dp,
            pcp=parallel.pcp,
            dcp=parallel.dcp,
            ep=parallel.ep,
            aiv=config.device.hccl_expansion == "AIV",
            query_len=config.speculative.num_tokens + 1,
        )


@dataclass(frozen=True)
class BudgetTerm:
    """One line of a price: ``total`` streams, and what they are for."""

    name: str
    total: int
    why: str


class BudgetModel(Protocol):
    """Prices graphs in streams. All methods are pure."""

    @property
    def name(self) -> BudgetModelName: ...

    def price(self, bucket: int, workload: Workload) -> int:
        """Return the streams that the graphs of one bucket take on one rank."""

    def fixed_price(self, workload: Workload) -> int:
        """Return the streams that are gone before the first bucket."""

    def max_buckets(self, offer: StreamOffer, workload: Workload) -> int:
        """Return how many buckets the offer pays for; zero where not even one."""

    def explain(self, workload: Workload) -> list[BudgetTerm]:
        """Return the terms of the price: those of one bucket first, then the fixed ones."""


@dataclass(frozen=True)
class LegacyBudget:
    """A historical formula as a budget model.

    The formulas price piecewise graphs, one between each two attentions. A full graph is priced
    like one of these pieces; upstream never applied the formula to full graphs.
    The formulas trust in 1800 streams. A rank that offers less is held to the least that a graph
    can take, one stream; whether its graphs take more, the transaction of capture finds out.
    """

    name: BudgetModelName

    @property
    def variant(self) -> Variant:
        return LEGACY_VARIANTS[self.name]

    def price(self, bucket: int, workload: Workload) -> int:
        return self._graphs(workload) * self._inputs(workload).streams_per_graph

    def fixed_price(self, workload: Workload) -> int:
        return sum(term.total for term in self._fixed_terms(workload))

    def max_buckets(self, offer: StreamOffer, workload: Workload) -> int:
        if workload.mode == "NONE":
            return 0
        left = LEGACY_STREAMS - self.fixed_price(workload)
        # Two divisions, as in the formula.
        graphs = self._graphs(workload)
        limit = max(0, math.floor(left / graphs / self._inputs(workload).streams_per_graph))
        limit = min(limit, offer.usable // graphs)
        return limit if offer.max_sizes is None else min(limit, offer.max_sizes)

    def explain(self, workload: Workload) -> list[BudgetTerm]:
        inputs = self._inputs(workload)
        graphs = self._graphs(workload)
        terms = [BudgetTerm("graphs", graphs, f"{graphs} captured graphs in each bucket")]
        extra = graphs * (inputs.streams_per_graph - 1)
        if extra:
            how = "AIV: one per group" if inputs.aiv else "two per TP or DP group"
            terms.append(BudgetTerm("communication", extra, f"streams inside each graph, {how}"))
        return terms + self._fixed_terms(workload)

    def _fixed_terms(self, workload: Workload) -> list[BudgetTerm]:
        inputs = self._inputs(workload)
        terms = []
        if self.variant == "last" and workload.mode == "FULL_AND_PIECEWISE":
            why = "one decode graph for each candidate size"
            terms.append(BudgetTerm("full graphs", workload.num_candidates, why))
        if inputs.aiv:
            if not inputs.moe:
                streams = self._graphs(workload) * inputs.streams_per_graph
                terms.append(BudgetTerm("all-reduce buffer", streams, "dense models under AIV"))
            return terms
        contexts = (inputs.pcp > 1) + (inputs.dcp > 1)
        if contexts and self.variant != "v0.11":
            streams = CONTEXT_PARALLEL_STREAMS * contexts
            terms.append(BudgetTerm("context parallelism", streams, "100 for each of PCP and DCP"))
        if inputs.num_groups:
            streams = GROUP_STREAMS * inputs.num_groups
            terms.append(BudgetTerm("groups", streams, "40 for each of TP and DP"))
        return terms

    def _graphs(self, workload: Workload) -> int:
        if workload.mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            return self._inputs(workload).num_graphs
        return 2 if workload.draft_layers else 1

    def _inputs(self, workload: Workload) -> LegacyInputs:
        return LegacyInputs(
            num_hidden_layers=workload.num_layers,
            moe=workload.moe,
            tp=workload.tp,
            dp=workload.dp,
            pcp=workload.pcp,
            dcp=workload.dcp,
            ep=workload.ep > 1,
            aiv=workload.aiv,
            multistream_shared=workload.multistream_shared,
            draft_layers=workload.draft_layers,
            cudagraph_mode=workload.mode,
        )


def make_budget_model(name: BudgetModelName) -> BudgetModel:
    """Return the budget model that the configuration names."""
    return LegacyBudget(name)
