"""The facts from the model and the configuration that determine the prices of graphs. These facts
are the same for every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dist_aclgraph.config import Config, ExchangeSetting, GraphMode, HcclExpansion
from dist_aclgraph.planning.buckets import kv_sizes
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.topology import GroupKind, ParallelLayout

COMMUNICATING: tuple[GroupKind, ...] = ("tp", "pcp", "dcp", "ep")


@dataclass(frozen=True)
class Domain:
    """A communication domain: its number of ranks, and the kinds of groups (e.g. "tp") that
    communicate in this domain.
    """

    num_ranks: int
    kinds: tuple[GroupKind, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work that every rank captures in graphs.

    Attributes:
        num_layers: number of hidden layers of the main model.
        mode: graph mode, which determines the kinds of graphs that a bucket has.
        draft_layers: number of layers of the draft model; 0 means that there is no draft model.
        exchange: the configured exchange of tokens between ranks with different experts.
        expansion: the way in which HCCL expands collectives on the device.
        multistream_shared: whether shared experts run on a separate stream.
        bytes_per_token: device memory of a graph in bytes, divided by its bucket's number of
            tokens. All graphs together need only the memory of the largest graph, because they
            share one pool.
        sums_norms: whether norms before attention span the heads of all ranks, so that ranks must
            add up the squares of their heads' elements.
        has_indexers: whether layers have indexers, which choose the keys to which queries attend.
        int8_latents: whether latents are quantised when they are written to the cache.
        num_kv_sizes: number of KV lengths for which each decode bucket has a graph of its own; 0 if
            each step sends its lengths to the captured attention operators.
    """

    num_layers: int
    mode: GraphMode = "FULL_DECODE_ONLY"
    moe: bool = False
    tp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: int = 1
    exchange: ExchangeSetting = "auto"
    expansion: HcclExpansion = "FFTS"
    multistream_shared: bool = False
    draft_layers: int = 0
    query_len: int = 1
    bytes_per_token: int = 0
    sums_norms: bool = False
    has_indexers: bool = False
    int8_latents: bool = False
    num_kv_sizes: int = 0

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
            exchange=parallel.exchange,
            expansion=config.device.expansion,
            multistream_shared=config.graph.overlap_shared_experts and facts.has_shared_experts,
            draft_layers=1 if config.speculative.num_tokens else 0,
            query_len=config.speculative.num_tokens + 1,
            sums_norms=facts.qk_norm_spans_heads and parallel.tp > 1,
            has_indexers=facts.indexer is not None,
            int8_latents=config.kv.dtype == "int8",
            num_kv_sizes=len(kv_sizes(config, facts.max_model_len(config))),
        )

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """The communication domains of rank 0. Groups that have the same ranks share one domain.

        Every other rank has the same number of domains.
        """
        layout = ParallelLayout(tp=self.tp, dp=self.dp, pcp=self.pcp, dcp=self.dcp, ep=self.ep)
        return tuple(
            Domain(
                len(ranks),
                tuple(kind for kind in COMMUNICATING if layout.group_of(kind, 0) == ranks),
            )
            for ranks in layout.domains_of(0)
        )
