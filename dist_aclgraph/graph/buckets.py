"""Buckets: the token counts at which graphs are captured, and how a batch is padded to one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.scheduler.step import RunMode

MAX_DECODE_TOKENS = 512  # larger decode batches gain little from a graph


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What names a captured graph, and nothing more.

    Attributes:
        num_tokens: padded token count, the bucket.
        num_reqs: padded request count.
        query_len: uniform query length, 0 where lengths differ.
        mode: how the graph was captured.
    """

    num_tokens: int
    num_reqs: int
    query_len: int
    mode: RunMode


def stepped_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, then steps of 8 below 256 and of 16 from there, up to ``largest``."""
    small = [size for size in (1, 2, 4) if size <= largest]
    return [*small, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]


def largest_decode_batch(max_num_seqs: int, query_len: int = 1) -> int:
    """Return the most tokens of a decode batch for which a graph is captured."""
    return min(max_num_seqs * query_len, MAX_DECODE_TOKENS // query_len * query_len)


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
    limit = MAX_DECODE_TOKENS // unit * unit
    if limit == 0:
        raise ConfigError(
            f"query length {query_len} and sequence parallel size {sequence_parallel} have no "
            f"common multiple up to {MAX_DECODE_TOKENS}; choose smaller ones"
        )
    largest = min(_round_up(largest_decode_batch(max_num_seqs, query_len), unit), limit)
    wanted = stepped_sizes(largest) if requested is None else requested
    sizes = {_round_up(size, unit) for size in wanted}
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def candidate_sizes(config: Config) -> tuple[int, ...]:
    """Return the sizes that a configuration would capture if every rank could afford them."""
    return capture_sizes(
        config.scheduler.max_num_seqs,
        query_len=config.speculative.num_tokens + 1,
        requested=config.graph.sizes,
    )


def pad_to_bucket(num_tokens: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that holds ``num_tokens``, or None where none does.

    ``buckets`` ascend.
    """
    index = bisect_left(buckets, num_tokens)
    return buckets[index] if index < len(buckets) else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
