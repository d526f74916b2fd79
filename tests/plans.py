"""Makes graph plans for tests from bucket sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_aclgraph.config import DECODE_MODES
from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.choice import choices
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan


def make_plan(
    *decode: int, mixed: tuple[int, ...] = (), query_len: int = 1, **fields: Any
) -> GraphPlan:
    """Return a plan with graphs for decode batches, and for mixed batches if the graph mode has
    such graphs.
    """
    mode = fields.pop("mode", "FULL_AND_PIECEWISE" if mixed else "FULL_DECODE_ONLY")
    families = []
    if decode and (mode in DECODE_MODES or (mode == "FULL" and mixed)):
        families.append(GraphFamily(run_mode="FULL", query_len=query_len, buckets=decode))
    if mixed or (decode and mode in ("PIECEWISE", "FULL")):
        run_mode = "FULL" if mode == "FULL" else "PIECEWISE"
        families.append(GraphFamily(run_mode=run_mode, query_len=0, buckets=mixed or decode))
    filled = {"version": 1, "max_num_seqs": 64, "budget_model": "legacy-last", **fields}
    return GraphPlan(mode=mode, families=tuple(families), **filled)


def decode_graph(bucket: int) -> BatchDescriptor:
    return BatchDescriptor(bucket, bucket, 1, "FULL")


def mixed_graph(bucket: int, max_num_seqs: int = 64) -> BatchDescriptor:
    return BatchDescriptor(bucket, min(bucket, max_num_seqs) + 1, 0, "FULL")


def pieces(bucket: int) -> BatchDescriptor:
    return BatchDescriptor(bucket, 0, 0, "PIECEWISE")


def choose(
    sizes: Sequence[int], weights: Mapping[int, float], costs: Sequence[float], max_buckets: int
) -> tuple[int, ...]:
    """From ``sizes``, choose at most ``max_buckets`` sizes with the lowest total cost; return them
    in ascending order.
    """
    return choices(sizes, weights, costs, max_buckets).buckets(min(max_buckets, len(sizes)))
