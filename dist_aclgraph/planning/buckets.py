"""Buckets: the token counts at which graphs are captured, and how a batch is padded to one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.descriptor import BatchDescriptor, RunMode

MAX_GRAPH_TOKENS = 512  # larger batches gain little from a graph
DECODE_MODES = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
MIXED_MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


class GraphFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs of one kind, at several sizes.

    Attributes:
        run_mode: FULL graphs hold their attention, PIECEWISE ones run it between their pieces.
        query_len: tokens of each request; 0 takes any mixture of prefill and decode.
        buckets: ascending, in tokens.
        refused: sizes that some rank could not capture; they are not tried again.
        max_buckets: the most that every rank could capture at once, known since one failed.
    """

    run_mode: RunMode
    query_len: int
    buckets: tuple[int, ...]
    refused: tuple[int, ...] = ()
    max_buckets: int | None = None

    @property
    def name(self) -> str:
        """In plain words, for tables and ledgers."""
        return f"{self.run_mode.lower()} {'decode' if self.query_len else 'mixed'}"

    def describe(self, bucket: int, max_num_seqs: int) -> BatchDescriptor:
        """Return the descriptor of one bucket.

        A mixed full graph has one request more than can run: it takes the padding tokens.
        """
        if self.run_mode == "PIECEWISE":
            return BatchDescriptor(bucket, 0, 0, self.run_mode)
        num_reqs = bucket // self.query_len if self.query_len else min(bucket, max_num_seqs) + 1
        return BatchDescriptor(bucket, num_reqs, self.query_len, self.run_mode)

    def has(self, graph: BatchDescriptor) -> bool:
        """Whether the graph is one of this family's."""
        return self.is_kind_of(graph) and graph.num_tokens in self.buckets

    def is_kind_of(self, graph: BatchDescriptor) -> bool:
        """Whether the graph is of this family's kind, at whatever size."""
        return (graph.mode, graph.query_len) == (self.run_mode, self.query_len)

    def keep(self, without: BatchDescriptor | None, limit: int | None = None) -> GraphFamily:
        """Return the family without one graph, and with at most ``limit`` of the others.

        Both last: the size is not tried again, or no more than ``limit`` are.
        """
        left = [b for b in self.buckets if without is None or b != without.num_tokens]
        if limit is not None:
            buckets = tuple(trim_sizes(left, limit))
            return msgspec.structs.replace(self, buckets=buckets, max_buckets=limit)
        refused = self.refused if without is None else (*self.refused, without.num_tokens)
        return msgspec.structs.replace(self, buckets=tuple(left), refused=refused)


def stepped_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, then steps of 8 below 256 and of 16 from there, up to ``largest``."""
    small = [size for size in (1, 2, 4) if size <= largest]
    return [*small, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]


def largest_decode_batch(max_num_seqs: int, query_len: int = 1) -> int:
    """Return the most tokens of a decode batch for which a graph is captured."""
    return min(max_num_seqs * query_len, MAX_GRAPH_TOKENS // query_len * query_len)


def capture_sizes(
    max_num_seqs: int,
    *,
    query_len: int = 1,
    sequence_parallel: int = 1,
    requested: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the candidate sizes for decode graphs, ascending; the largest batch always among them.

    Args:
        max_num_seqs: requests that run at once.
        query_len: tokens of each request in a decode step, draft tokens included (k + 1).
        sequence_parallel: TP size where activations are split over tokens, else 1.
        requested: sizes that the configuration asks for, instead of the stepped ones.

    Raises:
        ConfigError: no size is a multiple of both ``query_len`` and ``sequence_parallel``.
    """
    unit = math.lcm(query_len, sequence_parallel)
    limit = MAX_GRAPH_TOKENS // unit * unit
    if limit == 0:
        raise ConfigError(
            f"query length {query_len} and sequence parallel size {sequence_parallel} have no "
            f"common multiple up to {MAX_GRAPH_TOKENS}; choose smaller ones"
        )
    largest = min(_round_up(largest_decode_batch(max_num_seqs, query_len), unit), limit)
    wanted = stepped_sizes(largest) if requested is None else requested
    sizes = {_round_up(size, unit) for size in wanted}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def candidate_families(config: Config) -> tuple[GraphFamily, ...]:
    """Return the graphs that a configuration would capture if every rank could afford them."""
    mode, sizes = config.graph.mode, config.graph.sizes
    scheduler, query_len = config.scheduler, config.speculative.num_tokens + 1
    found = []
    if mode in DECODE_MODES:
        buckets = capture_sizes(scheduler.max_num_seqs, query_len=query_len, requested=sizes)
        found.append(GraphFamily(run_mode="FULL", query_len=query_len, buckets=buckets))
    if mode in MIXED_MODES:
        requested = config.graph.mixed_sizes if mode in DECODE_MODES else sizes
        buckets = capture_sizes(scheduler.max_num_batched_tokens, requested=requested)
        run_mode: RunMode = "FULL" if mode == "FULL" else "PIECEWISE"
        found.append(GraphFamily(run_mode=run_mode, query_len=0, buckets=buckets))
    return tuple(found)


def lazy_families(config: Config) -> tuple[GraphFamily, ...]:
    """Return the graphs that may be captured on demand, for shapes that the plan leaves out."""
    mode, lazy = config.graph.mode, config.graph.lazy
    scheduler, query_len = config.scheduler, config.speculative.num_tokens + 1
    found = []
    if lazy != "off" and mode in (*DECODE_MODES, "FULL"):
        buckets = capture_sizes(scheduler.max_num_seqs, query_len=query_len)
        found.append(GraphFamily(run_mode="FULL", query_len=query_len, buckets=buckets))
    if lazy == "on" and mode != "NONE":
        run_mode: RunMode = "FULL" if mode == "FULL" else "PIECEWISE"
        buckets = capture_sizes(scheduler.max_num_batched_tokens)
        found.append(GraphFamily(run_mode=run_mode, query_len=0, buckets=buckets))
    return tuple(found)


def pad_to_bucket(num_tokens: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that holds ``num_tokens``, or None where none does.

    ``buckets`` ascend.
    """
    index = bisect_left(buckets, num_tokens)
    return buckets[index] if index < len(buckets) else None


def trim_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` of the sizes, sampled evenly by index, both ends kept.

    With room for one, or for none, the last size stays: it alone covers every batch.
    """
    if limit >= len(sizes):
        return list(sizes)
    if limit <= 1:
        return list(sizes[-1:])
    step = (len(sizes) - 1) / (limit - 1)
    # round() is half-to-even here as in the source: another rounding picks other sizes.
    middle = [sizes[round(i * step)] for i in range(1, limit - 1)]
    return [sizes[0], *middle, sizes[-1]]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
