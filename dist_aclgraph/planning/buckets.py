"""Buckets: the numbers of tokens for which graphs are captured, and how a batch is padded to one of
these numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from dist_aclgraph.config import DECODE_MODES, Config
from dist_aclgraph.planning.descriptor import BatchDescriptor, RunMode

SMALLEST_KV_SIZE = 256
MIXED_MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


class GraphFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs of one kind, in several sizes.

    Attributes:
        run_mode: FULL if the graphs contain attention; PIECEWISE if attention runs eagerly between
            graphs.
        query_len: number of tokens of each request; 0 if the graphs accept any mixture of prefill
            and decode.
        buckets: the sizes of the graphs, in tokens and in ascending order.
        refused: sizes that at least one rank could not capture. No rank tries to capture these
            sizes again.
        max_buckets: maximum number of captured buckets; None means no maximum. A maximum is set
            after at least one rank has failed to capture one more bucket.
    """

    run_mode: RunMode
    query_len: int
    buckets: tuple[int, ...]
    refused: tuple[int, ...] = ()
    max_buckets: int | None = None

    @property
    def name(self) -> str:
        """The family's name in tables and ledgers."""
        return f"{self.run_mode.lower()} {'decode' if self.query_len else 'mixed'}"

    def describe(self, bucket: int, max_num_seqs: int) -> BatchDescriptor:
        """Return the descriptor of one bucket.

        A full graph for mixed batches has room for the maximum number of running requests, and for
        one additional request. The padding tokens belong to this additional request.
        """
        if self.run_mode == "PIECEWISE":
            return BatchDescriptor(bucket, 0, 0, self.run_mode)
        num_reqs = bucket // self.query_len if self.query_len else min(bucket, max_num_seqs) + 1
        return BatchDescriptor(bucket, num_reqs, self.query_len, self.run_mode)

    def has(self, graph: BatchDescriptor) -> bool:
        """Whether ``graph`` belongs to this family."""
        return self.is_kind_of(graph) and graph.num_tokens in self.buckets

    def is_kind_of(self, graph: BatchDescriptor) -> bool:
        """Whether ``graph`` has the kind of this family; its size does not matter."""
        return (graph.mode, graph.query_len) == (self.run_mode, self.query_len)

    def keep(self, without: BatchDescriptor | None, limit: int | None = None) -> GraphFamily:
        """Return a copy of the family that does not contain the graph ``without``, and has at most
        ``limit`` graphs.

        Both changes are permanent: the size of ``without`` is not tried again, and the family never
        has more than ``limit`` sizes.
        """
        left = [b for b in self.buckets if without is None or b != without.num_tokens]
        if limit is not None:
            buckets = tuple(trim_sizes(left, limit))
            return msgspec.structs.replace(self, buckets=buckets, max_buckets=limit)
        refused = self.refused if without is None else (*self.refused, without.num_tokens)
        return msgspec.structs.replace(self, buckets=tuple(left), refused=refused)


def stepped_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, then multiples of 8 below 256, then multiples of 16, up to ``largest``."""
    small = [size for size in (1, 2, 4) if size <= largest]
    return [*small, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]


def capture_sizes(largest_batch: int, max_tokens: int, query_len: int = 1) -> tuple[int, ...]:
    """Return the sizes that may be captured, in ascending order: the stepped sizes, and the size of
    the largest batch.

    Args:
        largest_batch: number of tokens of the largest batch that can run.
        max_tokens: maximum number of tokens of a graph.
        query_len: number of tokens of each request in a decode step, drafts included (k + 1). All
            sizes are multiples of this number.
    """
    largest = min(largest_batch, max_tokens) // query_len * query_len
    sizes = {-(-size // query_len) * query_len for size in stepped_sizes(largest)}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def candidate_families(config: Config) -> tuple[GraphFamily, ...]:
    """Return the families of graphs that are captured if every rank has enough streams and memory
    for all of them.
    """
    graph = config.graph
    found = []
    if config.has_decode_graphs:
        found.append(_decode_family(config, graph.sizes))
    if graph.mode in MIXED_MODES:
        sizes = graph.mixed_sizes if config.has_decode_graphs else graph.sizes
        found.append(_mixed_family(config, sizes))
    return tuple(found)


def asked_sizes(
    mode: str, decode: Sequence[int], mixed: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the keys of the configuration's section ``graph`` with which a user requests the sizes
    ``decode`` and ``mixed``.

    Keys that the graph mode ``mode`` does not use are omitted.
    """
    if mode == "FULL_AND_PIECEWISE":
        return {"sizes": tuple(decode), "mixed_sizes": tuple(mixed)}
    if mode == "NONE":
        return {}
    return {"sizes": tuple(decode if mode == "FULL_DECODE_ONLY" else mixed)}


def lazy_families(config: Config) -> tuple[GraphFamily, ...]:
    """Return the families of lazy graphs. Lazy graphs are not in the plan at start; they may be
    captured later, while the deployment serves requests.
    """
    mode, lazy = config.graph.mode, config.graph.lazy
    found = []
    if config.recovery.exact:
        return ()
    if lazy != "off" and mode in (*DECODE_MODES, "FULL"):
        found.append(_decode_family(config, None))
    if lazy == "on" and mode != "NONE":
        found.append(_mixed_family(config, None))
    return tuple(found)


def _decode_family(config: Config, sizes: Sequence[int] | None) -> GraphFamily:
    query_len = config.speculative.num_tokens + 1
    largest = config.scheduler.max_num_seqs * query_len
    buckets = sizes or capture_sizes(largest, config.graph.max_tokens, query_len)
    # In graphs of different sizes, results can have different rounding errors, so exact answers
    # need graphs of a single size.
    if config.recovery.exact:
        buckets = buckets[-1:]
    return GraphFamily(run_mode="FULL", query_len=query_len, buckets=tuple(buckets))


def _mixed_family(config: Config, sizes: Sequence[int] | None) -> GraphFamily:
    buckets = sizes or capture_sizes(
        config.scheduler.max_num_batched_tokens, config.graph.max_tokens
    )
    run_mode: RunMode = "FULL" if config.graph.mode == "FULL" else "PIECEWISE"
    return GraphFamily(run_mode=run_mode, query_len=0, buckets=tuple(buckets))


class BufferSizes(NamedTuple):
    """The largest size that each input and output has in any graph."""

    num_tokens: int
    num_reqs: int  # number of rows of the block tables
    num_samples: int  # number of rows of logits


def buffer_sizes(graphs: Iterable[BatchDescriptor], max_num_seqs: int) -> BufferSizes:
    """Return sizes of inputs and outputs that are large enough for every graph. Each size is at
    least 1.
    """
    tokens = reqs = samples = 1
    for graph in graphs:
        tokens = max(tokens, graph.num_tokens)
        # Piecewise graphs contain no attention, so they accept any number of requests and samples.
        reqs = max(reqs, graph.num_reqs or min(graph.num_tokens, max_num_seqs))
        samples = max(samples, graph.num_tokens if graph.query_len else graph.num_reqs)
    return BufferSizes(tokens, reqs, samples)


def pad_to_bucket(num_tokens: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that is at least ``num_tokens``, or None if no bucket is large
    enough.

    Args:
        buckets: ascending.
    """
    index = bisect_left(buckets, num_tokens)
    return buckets[index] if index < len(buckets) else None


def trim_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` of the sizes: the first, the last, and sizes at evenly spaced
    indices between them.

    If the limit is one or less, only the last size is returned, because only this size is large
    enough for every batch.
    """
    if limit >= len(sizes):
        return list(sizes)
    if limit <= 1:
        return list(sizes[-1:])
    step = (len(sizes) - 1) / (limit - 1)
    # round() rounds half to even, as vllm-ascend does. Another rounding would choose other sizes.
    middle = [sizes[round(i * step)] for i in range(1, limit - 1)]
    return [sizes[0], *middle, sizes[-1]]


def kv_sizes(config: Config, max_len: int) -> tuple[int, ...]:
    """Return the KV lengths for which each decode bucket has a graph of its own. The result is
    empty if each step sends its lengths to the graph.

    The lengths are numbers of tokens in ascending order, and multiples of the block size. Each
    length is twice the length before it. The last length is enough for a request of ``max_len``
    tokens.
    """
    if config.graph.updates == "sent":
        return ()
    sizes, size, block = [], SMALLEST_KV_SIZE, config.kv.block_size
    while size < max_len:
        sizes.append(size)
        size *= 2
    return tuple(dict.fromkeys(-(-size // block) * block for size in (*sizes, max_len)))
