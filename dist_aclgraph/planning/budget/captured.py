"""The contents of one bucket's graphs: their number, their lanes, and the length of each lane.

A lane is a captured stream. CANN keeps its tasks in queues of fixed length, so a long lane needs
several queues. Counts are queue entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.budget.domains import streams_per_graph
from dist_aclgraph.planning.budget.model import BudgetTerm, Price
from dist_aclgraph.planning.budget.workload import Domain, Workload

QUEUE_ENTRIES = 2016  # of a captured stream: 2048 less 32 that CANN reserves

# Operators of a dense layer (models/gqa.py), counted in the dumps of captured graphs: norm, qkv,
# two head norms, two rotations and the contiguous v before attention; output product, norm, two
# products and the activation after it. Models without head norms have two less.
BEFORE_ATTENTION = 7
AFTER_ATTENTION = 5
# Of a layer of experts, instead of a dense layer's three: router, routing, products, shared
# experts; gathered tokens need six more, an all-to-all with its indices thirty-five.
EXPERTS, GATHER, ALL_TO_ALL, DENSE = 23, 10, 39, 3
SHARED = 5  # on the lane of shared experts: a wait, two products, the activation, a record
# Cache write and attention, and the wait for its parameters with its reset: four entries each.
ATTENTION = 10
# Upper limit of the additional operators of a sharded cache (with latent attention, and ranks that
# repeat heads): queries are joined; results are converted to float32, masked, sent and merged.
SHARDED = 16
EMBEDDING = 3  # rows of the embedding and of the rotary tables
LAST_NORM = 1
HEAD = 3  # product, argmax, copy to the static buffer
# additional operators with TP: foreign ids masked out, parts joined
SPLIT_EMBEDDING, SPLIT_HEAD = 8, 2
COLLECTIVE_MAIN = 2  # on the waiting lane: a record and a wait
COLLECTIVE = 4  # on HCCL's lane: a wait, the collective, two records


@dataclass(frozen=True)
class Shape:
    """One of a bucket's graphs, or several alike.

    Attributes:
        what: description in plain words.
        copies: graphs of this shape in each bucket.
        main: entries of the main lane.
        collectives: number of collectives by domain; each domain has its own lane.
        beside: entries of the lane of shared experts, if they run beside the main lane.
    """

    what: str
    copies: int
    main: int
    collectives: tuple[tuple[Domain, int], ...] = ()
    beside: int = 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """Entries of each lane."""
        sides = [COLLECTIVE * count for _, count in self.collectives]
        waits = sum(COLLECTIVE_MAIN * count for _, count in self.collectives)
        return (self.main + waits, *sides, *([self.beside] if self.beside else []))

    def price(self, workload: Workload) -> Price:
        """Return the queues of one such graph, itemised; with old drivers each queue is a stream
        id.
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


def shapes(family: GraphFamily, workload: Workload) -> tuple[Shape, ...]:
    """Return the graphs of one bucket, draft graphs included."""
    found = _model_shapes(family, workload, workload.num_layers, 1, "")
    if not workload.draft_layers or family.run_mode != "FULL":
        return found  # behind pieces, drafts run eagerly
    steps = max(1, workload.query_len - 1)  # one graph contains all iterations of drafting
    return found + _model_shapes(family, workload, workload.draft_layers, steps, "draft ")


def price_of(found: tuple[Shape, ...], workload: Workload) -> Price:
    """Return the queues of all graphs of a bucket, one line for each shape and cause."""
    return tuple(
        replace(term, total=term.total * shape.copies, of=shape.what)
        for shape in found
        for term in shape.price(workload)
    )


def _model_shapes(
    family: GraphFamily, workload: Workload, layers: int, steps: int, prefix: str
) -> tuple[Shape, ...]:
    is_split = any("tp" in domain.kinds for domain in workload.domains)
    embedding, head = EMBEDDING, LAST_NORM + HEAD
    if is_split:
        embedding, head = embedding + SPLIT_EMBEDDING, head + SPLIT_HEAD
    after = AFTER_ATTENTION + (_experts(workload) - DENSE if workload.moe else 0)
    layer = BEFORE_ATTENTION + after
    beside = SHARED if workload.moe and workload.multistream_shared else 0
    if family.run_mode == "FULL":
        attention = ATTENTION + (SHARDED if workload.dcp > 1 else 0)
        main = embedding + layers * (layer + attention) + head
        count = {d: steps * _in_full(d, layers, workload) for d in workload.domains}
        return (Shape(f"{prefix}graph", 1, steps * main, _touched(count), steps * layers * beside),)
    # Collectives of context parallelism belong to attention, which pieces do not contain.
    first = {d: int("tp" in d.kinds) for d in workload.domains}
    later = {d: _after_attention(d) for d in workload.domains}
    between = Shape(f"{prefix}pieces between", layers - 1, layer, _touched(later), beside)
    return (
        Shape(f"{prefix}first piece", 1, embedding + BEFORE_ATTENTION, _touched(first)),
        *([between] if layers > 1 else []),
        Shape(f"{prefix}last piece", 1, after + LAST_NORM, _touched(later), beside),
    )


def _touched(counts: dict[Domain, int]) -> tuple[tuple[Domain, int], ...]:
    return tuple((domain, count) for domain, count in counts.items() if count)


def _experts(workload: Workload) -> int:
    """Operators of a layer of experts, with the longest of its possible exchanges."""
    if not any(_is_spread(domain) for domain in workload.domains):
        return EXPERTS
    return EXPERTS + (ALL_TO_ALL if workload.exchange in ("auto", "all_to_all") else GATHER)


def _is_spread(domain: Domain) -> bool:
    """Whether tokens must travel to their experts, because no single TP group has all experts."""
    return "ep" in domain.kinds and "tp" not in domain.kinds


def _after_attention(domain: Domain) -> int:
    """Collectives of a layer outside its attention: two sums over TP, and both ways over EP."""
    return 2 * ("tp" in domain.kinds) + 2 * _is_spread(domain)


def in_sharded_attention(workload: Workload) -> int:
    """Collectives over DCP in a decoding layer: shards exchange their results, and gather queries
    if they have different heads.

    PCP is for prompts, and has no collective in a graph.
    """
    if workload.dcp == 1:
        return 0
    return 1 if workload.dcp == workload.pcp else 2


def _in_full(domain: Domain, layers: int, workload: Workload) -> int:
    """Collectives of a full graph; with TP, one more for the embedding and one for the head."""
    in_attention = in_sharded_attention(workload) if "dcp" in domain.kinds else 0
    ends = 2 * ("tp" in domain.kinds)
    return layers * (_after_attention(domain) + in_attention) + ends
