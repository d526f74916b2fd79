"""Budget models that use the stream formulas of earlier vllm-ascend releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import BudgetModelName
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.formula import (
    CONTEXT_PARALLEL_STREAMS,
    GROUP_STREAMS,
    LegacyInputs,
    Variant,
    max_buckets,
)
from dist_aclgraph.planning.budget.model import BudgetTerm, Limit, Price, driver_limit, stream_limit
from dist_aclgraph.planning.budget.offer import StreamOffer
from dist_aclgraph.planning.budget.workload import Workload

LEGACY_VARIANTS: dict[BudgetModelName, Variant] = {
    "legacy-0.11": "v0.11",
    "legacy-0.13": "v0.13",
    "legacy-0.20": "v0.20",
    "legacy-last": "last",
}


@dataclass(frozen=True)
class LegacyBudget:
    """A budget model that uses one of the stream formulas of earlier vllm-ascend releases.

    The formulas compute prices of piecewise graphs (one graph between two attention operators), and
    limit the number of a plan's piecewise buckets. If a plan has no piecewise graphs, its full
    graphs are limited as if they were piecewise graphs, although vllm-ascend never applied the
    formula to full graphs. The formulas assume that 1800 streams are available. A second limit on
    the number of buckets uses the real number of available streams of a rank. For this limit, each
    graph counts as one stream, because every graph needs at least one stream. If graphs need more
    streams, their capture fails, and the plan gets smaller.
    """

    name: BudgetModelName
    workload: Workload

    @property
    def variant(self) -> Variant:
        return LEGACY_VARIANTS[self.name]

    def price(self, family: GraphFamily, offer: StreamOffer) -> Price:
        graphs = _graphs(family, self.workload)
        terms = [BudgetTerm("graphs", graphs, f"{graphs} captured graphs in each bucket")]
        extra = graphs * (_inputs(graphs, self.workload).streams_per_graph - 1)
        if extra and _is_priced(family, self.workload):
            how = "AIV: one per group" if _is_aiv(self.workload) else "two per TP or DP group"
            terms.append(BudgetTerm("communication", extra, f"streams inside each graph, {how}"))
        return tuple(terms)

    def fixed(self, offer: StreamOffer) -> Price:
        graphs = _inputs(None, self.workload).num_graphs if _has_pieces(self.workload) else 1
        inputs = _inputs(graphs, self.workload)
        if inputs.aiv:
            streams = graphs * inputs.streams_per_graph
            why = "dense models under AIV"
            return () if inputs.moe else (BudgetTerm("all-reduce buffer", streams, why),)
        terms = []
        contexts = (inputs.pcp > 1) + (inputs.dcp > 1)
        if contexts and self.variant != "v0.11":
            streams = CONTEXT_PARALLEL_STREAMS * contexts
            terms.append(BudgetTerm("context parallelism", streams, "100 for each of PCP and DCP"))
        if inputs.num_groups:
            streams = GROUP_STREAMS * inputs.num_groups
            terms.append(BudgetTerm("groups", streams, "40 for each of TP and DP"))
        return tuple(terms)

    def limits(self, families: Sequence[GraphFamily], offer: StreamOffer) -> tuple[Limit, ...]:
        priced = [family for family in families if _is_priced(family, self.workload)]
        graphs = _graphs(priced[0], self.workload) if priced else 1
        num_candidates = max((len(family.buckets) for family in families), default=0)
        inputs = _inputs(graphs, self.workload, num_candidates)
        return (
            Limit(
                f"buckets by {self.name}",
                max(0, max_buckets(inputs, self.variant)),
                tuple(int(family in priced) for family in families),
            ),
            stream_limit([_graphs(family, self.workload) for family in families], offer),
            *driver_limit(families, offer),
        )

    def bytes_per_token(self, family: GraphFamily, offer: StreamOffer) -> float:
        return self.workload.bytes_per_token


def _has_pieces(workload: Workload) -> bool:
    return workload.mode in ("PIECEWISE", "FULL_AND_PIECEWISE")


def _is_priced(family: GraphFamily, workload: Workload) -> bool:
    return family.run_mode == "PIECEWISE" or not _has_pieces(workload)


def _is_aiv(workload: Workload) -> bool:
    return workload.expansion == "AIV"


def _graphs(family: GraphFamily, workload: Workload) -> int:
    if family.run_mode == "PIECEWISE":
        return _inputs(None, workload).num_graphs
    return 2 if workload.draft_layers else 1


def _inputs(num_graphs: int | None, workload: Workload, num_candidates: int = 0) -> LegacyInputs:
    """Return the formula's inputs.

    Args:
        num_graphs: number of graphs of a bucket; None means the number of piecewise graphs.
    """
    return LegacyInputs(
        num_hidden_layers=workload.num_layers if num_graphs is None else num_graphs - 1,
        moe=workload.moe,
        tp=workload.tp,
        dp=workload.dp,
        pcp=workload.pcp,
        dcp=workload.dcp,
        ep=workload.ep > 1,
        aiv=_is_aiv(workload),
        multistream_shared=workload.multistream_shared,
        draft_layers=workload.draft_layers if num_graphs is None else 0,
        cudagraph_mode=workload.mode,
        sizes=range(1, num_candidates + 1),
    )
