"""The contents of one bucket's graphs: the number of graphs, the lanes of each graph, and the
length of each lane.

A lane is a captured stream. CANN stores the tasks of a lane in queues of fixed length, so a long
lane needs several queues. The length of a lane is its number of queue entries; an operator usually
takes one entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.domains import streams_per_graph
from dist_aclgraph.planning.budget.model import BudgetTerm, Price
from dist_aclgraph.planning.budget.workload import Domain, Workload

QUEUE_ENTRIES = 2016  # number of usable entries of one queue: 2048, minus 32 that CANN reserves

# Numbers of operators of a dense layer (models/gqa.py), counted in dumps of captured graphs. Before
# attention: a norm, the product qkv, two head norms, two rotations, and the copy that makes v
# contiguous. Models without head norms have two operators fewer. After attention: the output
# product, a norm, two products and the activation.
BEFORE_ATTENTION = 7
AFTER_ATTENTION = 5
# Number of additional operators before attention if norms span the heads of several ranks: six for
# the scales of both norms, two for q (a multiplication and a conversion), and two for k.
SUMMED_NORMS = 10
# Number of additional operators before sparse attention. One operator is for the queries of latent
# attention. Six operators are for the indexer: a layer norm, two rotations, two concatenations, and
# the product that computes the weights of the indexer's heads. Sparse attention itself takes at
# most ATTENTION queue entries.
INDEXER = 7
# EXPERTS is the number of operators for experts in a layer: router, routing, products and shared
# experts. These operators replace the DENSE operators of a dense layer: two products and the
# activation. An exchange by gathering tokens adds GATHER operators. An exchange by all-to-all, with
# its indices, adds ALL_TO_ALL operators.
EXPERTS, GATHER, ALL_TO_ALL, DENSE = 23, 10, 39, 3
SHARED = 5  # queue entries on the stream of shared experts: wait, two products, activation, record
# Queue entries of attention in a layer: one for the cache write, one for attention, four for the
# wait for attention's lengths, and four for the reset of the event.
ATTENTION = 10
# If lengths are never updated, each layer has PADDED_ATTENTION entries: the cache write and
# attention. Each graph also computes the mask once, which takes MASK entries: indices, a
# comparison, and a copy of the block table.
PADDED_ATTENTION, MASK = 2, 3
# Maximum number of additional operators if the cache is sharded. These operators join queries,
# convert results to float32, and mask, send and merge these results. Latent attention with copies
# of heads needs all sixteen.
SHARDED = 16
# Maximum number of operators in addition to SHARDED if the cache of sparse attention is sharded.
# Some of these operators map the chosen keys to slots of the shard. The other operators compute
# log-sum-exps from the greatest scores and the sums that the attention operator returns.
REMAPPED = 26
# Number of additional operators if latents are stored in int8. Six of them write the cache: two
# copies, a rotation, the quantisation, a join and the scatter. The seventh operator joins the two
# parts of the queries.
INT8_LATENTS = 7
# Number of operators of ``seen_blocks``, which computes the blocks that each query may see:
# indices, a product, a comparison, a constant, and ``where``. Models with latents in int8 and
# without an indexer need these operators. Only the first layer with such latents runs these
# operators.
SEEN_BLOCKS = 5
EMBEDDING = 3  # three gathers: from the embedding, from the cos table, from the sin table
LAST_NORM = 1
HEAD = 3  # operators of the head: product, argmax, and copy to the static buffer
# Numbers of additional operators with TP. These operators mask the token ids of other ranks, and
# join the ranks' parts of the logits.
SPLIT_EMBEDDING, SPLIT_HEAD = 8, 2
COLLECTIVE_MAIN = 2  # entries on the stream that waits for the collective: record, wait
COLLECTIVE = 4  # entries on HCCL's stream: a wait, the collective, two records


@dataclass(frozen=True)
class GraphShape:
    """One graph of a bucket, or several equal graphs of a bucket. A lane is a captured stream.

    Attributes:
        what: description in plain words.
        copies: number of graphs of this shape in each bucket.
        main: number of queue entries of the main lane, without the entries for collectives.
        collectives: for each communication domain, the number of its collectives. Each domain has
            its own lane.
        beside: number of queue entries of the lane for shared experts; 0 if shared experts run on
            the main lane.
    """

    what: str
    copies: int
    main: int
    collectives: tuple[tuple[Domain, int], ...] = ()
    beside: int = 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """Number of queue entries of each lane (captured stream)."""
        sides = [COLLECTIVE * count for _, count in self.collectives]
        waits = sum(COLLECTIVE_MAIN * count for _, count in self.collectives)
        return (self.main + waits, *sides, *([self.beside] if self.beside else []))

    def price(self, workload: Workload) -> Price:
        """Return one term for each use of queues, e.g. the main lane. A term contains the number of
        queues that one graph of this shape needs for this use. With old drivers, each queue needs
        one stream id.
        """
        cascaded = sum(-(-lane // QUEUE_ENTRIES) - 1 for lane in self.lanes)
        num_domains = len(self.collectives)
        inner = num_domains * streams_per_graph(workload.expansion)
        terms = (
            BudgetTerm("main lane", 1, "one captured stream"),
            BudgetTerm("HCCL lanes", num_domains, "one for each domain that the graph touches"),
            BudgetTerm("domains", inner, f"what {workload.expansion} takes in these domains"),
            BudgetTerm("overlap", int(self.beside > 0), "shared experts beside the main lane"),
            BudgetTerm("cascades", cascaded, f"lanes longer than {QUEUE_ENTRIES} entries"),
        )
        return tuple(term for term in terms if term.total)


def shapes(family: GraphFamily, workload: Workload) -> tuple[GraphShape, ...]:
    """Return the shapes of one bucket's graphs, including the graphs for drafts."""
    found = _model_shapes(family, workload, workload.num_layers, 1, "")
    if not (workload.draft_layers and family.query_len):
        return found  # after mixed batches, drafting runs eagerly
    steps = max(1, workload.query_len - 1)  # One graph contains all iterations of drafting.
    return found + _model_shapes(family, workload, workload.draft_layers, steps, "draft ")


def price_of(found: tuple[GraphShape, ...], workload: Workload) -> Price:
    """Return the terms of all shapes of a bucket; see ``GraphShape.price``. Each term counts the
    queues of all graphs of its shape.
    """
    return tuple(
        replace(term, total=term.total * shape.copies, of=shape.what)
        for shape in found
        for term in shape.price(workload)
    )


def _model_shapes(
    family: GraphFamily, workload: Workload, layers: int, steps: int, prefix: str
) -> tuple[GraphShape, ...]:
    is_split = any("tp" in domain.kinds for domain in workload.domains)
    embedding, head = EMBEDDING, LAST_NORM + HEAD
    if is_split:
        embedding, head = embedding + SPLIT_EMBEDDING, head + SPLIT_HEAD
    after = AFTER_ATTENTION + (_experts(workload) - DENSE if workload.moe else 0)
    before = BEFORE_ATTENTION + (SUMMED_NORMS if workload.sums_norms else 0)
    before += INDEXER if workload.has_indexers else 0
    layer = before + after
    beside = SHARED if workload.moe and workload.multistream_shared else 0
    if family.run_mode == "FULL":
        is_padded = workload.num_kv_sizes > 0 and family.query_len > 0
        attention = PADDED_ATTENTION if is_padded else ATTENTION
        if workload.int8_latents:
            attention += INT8_LATENTS
        if workload.dcp > 1:
            attention += SHARDED + (REMAPPED if workload.has_indexers else 0)
        main = embedding + layers * (layer + attention) + head + (MASK if is_padded else 0)
        if workload.int8_latents and not workload.has_indexers:
            main += 1 + SEEN_BLOCKS  # plus one sum, which computes how many keys each query may see
        copies = workload.num_kv_sizes if is_padded else 1
        count = {d: steps * _in_full(d, layers, workload) for d in workload.domains}
        beside *= steps * layers
        return (GraphShape(f"{prefix}graph", copies, steps * main, _touched(count), beside),)
    # Collectives of context parallelism belong to attention, so piecewise graphs contain none of
    # them.
    norms = {d: _before_attention(d, workload) for d in workload.domains}
    first = {d: int("tp" in d.kinds) + norms[d] for d in workload.domains}
    last = {d: _after_attention(d) for d in workload.domains}
    later = {d: last[d] + norms[d] for d in workload.domains}
    between = GraphShape(f"{prefix}pieces between", layers - 1, layer, _touched(later), beside)
    return (
        GraphShape(f"{prefix}first piece", 1, embedding + before, _touched(first)),
        *([between] if layers > 1 else []),
        GraphShape(f"{prefix}last piece", 1, after + LAST_NORM, _touched(last), beside),
    )


def _touched(counts: dict[Domain, int]) -> tuple[tuple[Domain, int], ...]:
    return tuple((domain, count) for domain, count in counts.items() if count)


def _experts(workload: Workload) -> int:
    """Return the number of operators of a layer of experts. The number includes the operators that
    exchange tokens between ranks. If several exchanges are possible, the exchange with the most
    operators is counted.
    """
    if not any(_is_spread(domain) for domain in workload.domains):
        return EXPERTS
    return EXPERTS + (ALL_TO_ALL if workload.exchange in ("auto", "all_to_all") else GATHER)


def _is_spread(domain: Domain) -> bool:
    """Whether the experts are divided among the ranks of this domain, so that tokens must be sent
    to their experts.
    """
    return "ep" in domain.kinds and "tp" not in domain.kinds


def _before_attention(domain: Domain, workload: Workload) -> int:
    """Return the number of a layer's collectives before attention. If norms span the heads of all
    ranks, one collective adds up the ranks' sums of squares.
    """
    return int(workload.sums_norms and "tp" in domain.kinds)


def _after_attention(domain: Domain) -> int:
    """Return the number of a layer's collectives after attention: two over TP, and two over EP."""
    return 2 * ("tp" in domain.kinds) + 2 * _is_spread(domain)


def in_sharded_attention(workload: Workload) -> int:
    """Return the number of collectives over DCP in one layer of a decode graph.

    The ranks exchange the results of their shards. Ranks with different heads also gather the
    queries. PCP is used only for prompts, so decode graphs contain no collective over PCP.
    """
    if workload.dcp == 1:
        return 0
    return 1 if workload.dcp == workload.pcp else 2


def _in_full(domain: Domain, layers: int, workload: Workload) -> int:
    """Return the number of collectives over a domain in a full graph. For TP, this includes the
    collectives of the embedding and of the output head.
    """
    in_attention = in_sharded_attention(workload) if "dcp" in domain.kinds else 0
    ends = 2 * ("tp" in domain.kinds)
    in_layer = _before_attention(domain, workload) + in_attention + _after_attention(domain)
    return layers * in_layer + ends
