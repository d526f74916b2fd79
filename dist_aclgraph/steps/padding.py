"""Pads a step's lengths to the size of a full graph.

Invariants: there are one query end and one KV length for each row of the graph. Query ends do not
decrease, and the last query end is the graph's number of tokens. KV lengths are at least one. If
the cache is sharded, a row is a token; otherwise a row is a request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.planning.descriptor import BatchDescriptor

PADDING_KV_LEN = 1


class Lens(NamedTuple):
    """The lengths with which a full graph computes attention.

    Attributes:
        query_ends: [num_rows], cumulative query lengths.
        kv_lens: one or more lists of KV lengths, [num_rows] each. The decoder and the first
            iteration of drafting use the first list. Each later iteration has its own list, because
            each iteration makes all requests one token longer.
    """

    query_ends: list[int]
    kv_lens: tuple[list[int], ...]


class GraphLens:
    """Pads the query and KV lengths of a step to the size of a graph.

    This object keeps its last result. The worker often pads the same lengths twice: when it
    predicts the next step, and when this step arrives.

    Args:
        place: the indices of this rank in context parallelism. The KV lengths that ``pad`` returns
            count only the keys that this rank stores.
        num_drafts: k, number of drafts of each request that decodes.
    """

    def __init__(self, place: ContextPlace, num_drafts: int = 0) -> None:
        self._place = place
        self._iterations = range(max(1, num_drafts))
        self._last: tuple[BatchDescriptor, bytes] | None = None
        self._last_lens = Lens([], ())
        self._uniform_ends: dict[BatchDescriptor, list[int]] = {}  # the lists are never changed

    def pad(self, graph: BatchDescriptor, query_ends: IntArray, kv_lens: IntArray) -> Lens:
        """Return the lengths of a step, padded to the size of ``graph``.

        Args:
            query_ends, kv_lens: [num_reqs], cumulative query lengths and KV lengths of the live
                requests. These KV lengths count the keys of all shards together.
        """
        if self._place.is_sharded:
            asked = graph, kv_lens.tobytes()
            if asked != self._last:
                self._last, self._last_lens = asked, self._pad_tokens(graph, kv_lens)
            return self._last_lens
        if graph.query_len:
            ends, lens = self._ends_of(graph), _pad_uniform(graph, kv_lens)
        else:
            ends, lens = pad_mixed(graph, query_ends, kv_lens)
        later = ([length + ahead for length in lens] for ahead in self._iterations[1:])
        return Lens(ends, (lens, *later))

    def _ends_of(self, graph: BatchDescriptor) -> list[int]:
        """Return the query ends of a graph whose requests all have the same number of query tokens.
        These query ends are constant.
        """
        ends = self._uniform_ends.get(graph)
        if ends is None:
            ends = list(range(graph.query_len, graph.num_tokens + 1, graph.query_len))
            self._uniform_ends[graph] = ends
        return ends

    def _pad_tokens(self, graph: BatchDescriptor, kv_lens: IntArray) -> Lens:
        """Return lengths with one row for each token. A token attends to this shard's keys up to
        the token's position.

        If this shard has no keys for a token, the KV length of the token's row is one, and the
        row's result is discarded.
        """
        assert graph.query_len, "mixed batches are not captured where the cache is sharded"
        index = np.arange(1 - graph.query_len, 1, dtype=np.int32)
        seen = np.ones(graph.num_tokens, np.int32)
        seen[: len(kv_lens) * graph.query_len] = (kv_lens[:, None] + index).ravel()
        return Lens(
            list(range(1, graph.num_tokens + 1)),
            tuple(shard_lens(self._place, seen + ahead).tolist() for ahead in self._iterations),
        )


def shard_lens(place: ContextPlace, lens: IntArray) -> IntArray:
    """Return, for each row, how many of the row's keys a shard keeps. The result is at least one,
    because operators require this.
    """
    return np.maximum(place.shards.lengths(lens, place.shard), PADDING_KV_LEN)


def padding_len(graph: BatchDescriptor, num_tokens: int, num_reqs: int) -> int:
    """Return the KV length of the longest padding request in a full graph; 0 if the graph has no
    padding request.

    Args:
        num_tokens, num_reqs: numbers of live tokens and of live requests.
    """
    missing = graph.num_reqs - num_reqs
    if missing == 0:
        return 0
    return max(graph.query_len or _share(graph.num_tokens - num_tokens, missing), PADDING_KV_LEN)


def padding_blocks(graph: BatchDescriptor, num_tokens: int, num_reqs: int, block_size: int) -> int:
    """Return how many blocks the padding requests of a full graph need, if attention counts each
    use of the dummy block (``BlockPool``, ``counts_shared``).

    Args:
        num_tokens, num_reqs: numbers of live tokens and of live requests.
    """
    length = padding_len(graph, num_tokens, num_reqs)
    return (graph.num_reqs - num_reqs) * -(-length // block_size)


def _share(num_tokens: int, num_reqs: int) -> int:
    """Return the largest number of padding tokens of one padding request."""
    return -(-num_tokens // num_reqs)


def _pad_uniform(graph: BatchDescriptor, kv_lens: IntArray) -> list[int]:
    # A padding request has as many query tokens as a live request. Its KV length is the number of
    # these query tokens.
    missing = graph.num_reqs - len(kv_lens)
    padded: list[int] = kv_lens.tolist() + [max(graph.query_len, PADDING_KV_LEN)] * missing
    return padded


def pad_mixed(
    graph: BatchDescriptor, query_ends: IntArray, kv_lens: IntArray
) -> tuple[list[int], list[int]]:
    """Return query ends and KV lengths of a mixed batch, padded to the size of ``graph``.

    The padding tokens are divided among the padding requests.
    """
    ends, lens = query_ends.tolist(), kv_lens.tolist()
    end = ends[-1] if ends else 0
    missing = graph.num_reqs - len(ends)
    share = _share(graph.num_tokens - end, missing) if missing else 0
    for _ in range(missing):
        length = min(share, graph.num_tokens - end)
        end += length
        ends.append(end)
        lens.append(max(length, PADDING_KV_LEN))
    return ends, lens
