"""Which requests of a step attend over latents in which form: pure functions.

The *absorbed* form attends over the latents themselves, all heads sharing one key; the operator
takes few queries of a request. The *plain* form makes keys and values of the latents first, which
pays where a request has many queries; the tokens that are made at once are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_aclgraph.ints import IntArray

MAX_ABSORBED_QUERIES = 16  # of one request, the operator's limit
MAX_PLAIN_TOKENS = 8192  # whose keys and values exist at once; a request's own queries may be more


@dataclass(frozen=True)
class Chunk:
    """KV tokens that are attended to in one launch.

    Attributes:
        start, stop: among the KV tokens of all requests in plain form, in batch order.
        query_ends, kv_ends: cumulative lengths of the requests in it.
        is_causal: whether its last tokens are the queries' own; else all of it is visible.
    """

    start: int
    stop: int
    query_ends: list[int]
    kv_ends: list[int]
    is_causal: bool


@dataclass(frozen=True)
class PlainPart:
    """Requests, or one of them, whose keys and values are made at once, or chunk by chunk.

    Attributes:
        start, stop: its tokens in the batch.
    """

    start: int
    stop: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Forms:
    """How the requests of a step attend: the first ones absorbed, all others in plain parts.

    Attributes:
        num_absorbed: requests in absorbed form.
    """

    num_absorbed: int
    plain: tuple[PlainPart, ...]


def choose_forms(
    query_ends: Sequence[int],
    kv_lens: Sequence[int],
    *,
    max_tokens: int = MAX_PLAIN_TOKENS,
    max_queries: int = MAX_ABSORBED_QUERIES,
) -> Forms:
    """Return the forms of a step; the absorbed ends before the first request that is too long.

    Args:
        query_ends: cumulative query lengths [num_reqs].
        kv_lens: [num_reqs], queries included.
        max_tokens: KV tokens of a chunk, where a request has not more queries than that.
        max_queries: of an absorbed request.
    """
    query_lens = np.diff(query_ends, prepend=0).tolist()
    too_long = (i for i, length in enumerate(query_lens) if length > max_queries)
    num_absorbed = next(too_long, len(query_lens))
    parts: list[PlainPart] = []
    together: list[tuple[int, int]] = []
    token = query_ends[num_absorbed - 1] if num_absorbed else 0
    kv_token = 0

    def close_part() -> None:
        if together:
            parts.append(_part_of_several(together, token, kv_token))
            together.clear()

    for lens in zip(query_lens[num_absorbed:], kv_lens[num_absorbed:], strict=True):
        if sum(kv_len for _, kv_len in together) + lens[1] > max_tokens:
            close_part()
        query_len, kv_len = lens
        if kv_len > max_tokens:
            parts.append(_part_of_one(query_len, kv_len, token, kv_token, max_tokens))
        else:
            together.append(lens)
        token, kv_token = token + query_len, kv_token + kv_len
    close_part()
    return Forms(num_absorbed, tuple(parts))


def _part_of_several(lens: Sequence[tuple[int, int]], token: int, kv_token: int) -> PlainPart:
    """Requests of (queries, KV tokens) that end at ``token`` and ``kv_token``."""
    query_ends, kv_ends = (np.cumsum(column).tolist() for column in zip(*lens, strict=True))
    chunk = Chunk(kv_token - kv_ends[-1], kv_token, query_ends, kv_ends, is_causal=True)
    return PlainPart(token - query_ends[-1], token, (chunk,))


def _part_of_one(
    query_len: int, kv_len: int, token: int, kv_token: int, max_tokens: int
) -> PlainPart:
    """A request that begins at ``token`` and ``kv_token``; its queries' own tokens come last."""
    chunks, done = [], 0
    while kv_len - done > max(max_tokens, query_len):
        length = min(max_tokens, kv_len - query_len - done)
        start = kv_token + done
        chunks.append(Chunk(start, start + length, [query_len], [length], is_causal=False))
        done += length
    rest = kv_len - done
    last = Chunk(kv_token + done, kv_token + kv_len, [query_len], [rest], is_causal=True)
    return PlainPart(token, token + query_len, (*chunks, last))


def kv_slots_of(block_table: IntArray, kv_lens: Sequence[int], block_size: int) -> IntArray:
    """Return the slots of all KV tokens of some requests, one request after the other.

    Args:
        block_table: [num_reqs, num_blocks].
    """
    offsets = np.arange(block_size, dtype=np.int32)
    parts = []
    for blocks, length in zip(block_table, kv_lens, strict=True):
        used = blocks[: -(-length // block_size), None]
        parts.append((used * block_size + offsets).ravel()[:length])
    return np.concatenate(parts, dtype=np.int32)
