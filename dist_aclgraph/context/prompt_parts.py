"""Plans attention for requests with many query tokens. The keys of such a request are read chunk by
chunk.

The keys come from the caches of all shards. The KV tokens of a request are cut into chunks. All
ranks read a chunk together, so the chunks are the same on every rank. The queries of a rank are cut
at the boundaries of the chunks. In the chunk that contains a query's position, the query attends
causally; in each earlier chunk, the query attends to all keys. So there are two kinds of launches
of the attention operator. A launch of the first kind is causal. In a launch of the second kind,
each query attends to all keys of the launch. If a query attends to several chunks, its results from
these chunks are merged. Several short requests share a chunk if their KV tokens fit in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.prompt_split import Piece, PromptSplit
from dist_aclgraph.context.shards import Shards

# Maximum number of KV tokens of a chunk. This maximum limits the memory of the gathered keys and
# values.
MAX_CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Launch:
    """One launch of the attention operator.

    Attributes:
        start, stop: range of the launch's queries among the rank's tokens.
        query_ends, kv_ends: cumulative numbers of queries and of keys, one number for each piece. A
            piece contains neighbouring queries of one request.
        kv: the KV tokens to which the launch attends, as indices among the chunk's tokens.
        is_causal: whether attention is causal. If true, the last keys of a piece belong to the same
            tokens as the queries of the piece. If false, every query attends to all keys.
    """

    start: int
    stop: int
    query_ends: list[int]
    kv_ends: list[int]
    kv: IntArray
    is_causal: bool


@dataclass(frozen=True)
class KeyChunk:
    """The KV tokens whose keys are read together.

    Attributes:
        requests, positions: [num_kv], request and position of each KV token.
        launches: this rank's launches; empty if no query of the rank attends to the chunk.
    """

    requests: IntArray
    positions: IntArray
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Part:
    """A unit of attention work: several requests that share one chunk, or one request that has its
    own chunks.

    Attributes:
        start, stop: range of the part's queries among the rank's tokens.
    """

    start: int
    stop: int
    chunks: tuple[KeyChunk, ...]


@dataclass(frozen=True)
class _Queries:
    """Neighbouring query tokens of one request on a rank; ``position`` is the position of the first
    of them.
    """

    request: int
    position: int
    start: int
    stop: int

    @property
    def end_position(self) -> int:
        return self.position + self.stop - self.start


def plan_parts(
    query_lens: IntArray,
    kv_lens: IntArray,
    split: PromptSplit,
    rank: int,
    max_tokens: int = MAX_CHUNK_TOKENS,
    *,
    cuts_requests: bool = True,
) -> tuple[Part, ...]:
    """Return the parts for one prefill rank. The parts cover all requests that the prefill ranks
    split.

    The division into parts and chunks is the same on every rank, but each rank has its own
    launches.

    Args:
        query_lens: [num_reqs], number of query tokens of each request.
        kv_lens: [num_reqs], KV length of each request, its queries included.
        max_tokens: maximum number of KV tokens of a chunk.
        cuts_requests: whether a request with more than ``max_tokens`` KV tokens is cut into several
            chunks. If false, such a request has one chunk, which is longer than ``max_tokens``.
    """
    first = int(np.searchsorted(np.cumsum(query_lens), split.num_whole_tokens, "right"))
    queries = _queries_of(split.pieces[rank], query_lens, kv_lens, split.num_whole_tokens)
    parts, token = [], split.num_whole_tokens
    for requests in _groups(range(first, len(query_lens)), kv_lens, max_tokens):
        own = [q for q in queries if q.request in requests]
        stop = own[-1].stop if own else token
        if len(requests) == 1 and cuts_requests:
            chunks = _chunks_of_one(requests[0], int(kv_lens[requests[0]]), own, max_tokens)
        else:
            chunks = (_shared_chunk(requests, kv_lens, own),)
        parts.append(Part(token, stop, chunks))
        token = stop
    return tuple(parts)


def _queries_of(
    pieces: Sequence[Piece], query_lens: IntArray, kv_lens: IntArray, token: int
) -> list[_Queries]:
    ends = np.cumsum(query_lens)
    queries = []
    for piece in pieces:
        position = int(kv_lens[piece.request] - ends[piece.request]) + piece.start
        stop = token + piece.stop - piece.start
        queries.append(_Queries(piece.request, position, token, stop))
        token = stop
    return queries


def _groups(requests: range, kv_lens: IntArray, max_tokens: int) -> Iterator[range]:
    """Yield groups of requests. A group contains neighbouring requests that share one chunk. A
    request that is at least as long as a chunk is a group of its own.
    """
    start, total = requests.start, 0
    for request in requests:
        length = int(kv_lens[request])
        if total and total + length > max_tokens:
            yield range(start, request)
            start, total = request, 0
        total += length
    if start < requests.stop:
        yield range(start, requests.stop)


def _shared_chunk(requests: range, kv_lens: IntArray, own: Sequence[_Queries]) -> KeyChunk:
    lens = kv_lens[requests.start : requests.stop]
    starts = np.cumsum(lens) - lens
    launches: tuple[Launch, ...] = ()
    if own:
        visible = [q.end_position for q in own]
        first = [int(starts[q.request - requests.start]) for q in own]
        kv = [np.arange(at, at + n) for at, n in zip(first, visible, strict=True)]
        launches = (_launch(own, np.concatenate(kv), visible, is_causal=True),)
    each = np.arange(requests.start, requests.stop, dtype=np.int32)
    positions = [np.arange(length, dtype=np.int32) for length in lens]
    return KeyChunk(np.repeat(each, lens), np.concatenate(positions), launches)


def _chunks_of_one(
    request: int, kv_len: int, own: Sequence[_Queries], max_tokens: int
) -> tuple[KeyChunk, ...]:
    chunks = []
    for start in range(0, kv_len, max_tokens):
        stop = min(kv_len, start + max_tokens)
        launches = [
            _launch([diagonal], _first(diagonal.end_position - start), None, is_causal=True)
            for q in own
            if (diagonal := _within(q, start, stop)) is not None
        ]
        later = [after for q in own if (after := _within(q, stop, kv_len)) is not None]
        if later:  # The later queries are neighbours on this rank, so one launch is enough.
            both = _Queries(request, stop, later[0].start, later[-1].stop)
            launches.append(_launch([both], _first(stop - start), None, is_causal=False))
        positions = np.arange(start, stop, dtype=np.int32)
        chunks.append(KeyChunk(np.full_like(positions, request), positions, tuple(launches)))
    return tuple(chunks)


def _within(q: _Queries, start: int, stop: int) -> _Queries | None:
    """Return the query tokens of ``q`` at positions from ``start`` to ``stop``; None if there are
    none.
    """
    first, last = max(q.position, start), min(q.end_position, stop)
    if first >= last:
        return None
    return _Queries(q.request, first, q.start + first - q.position, q.start + last - q.position)


def _first(count: int) -> IntArray:
    return np.arange(count, dtype=np.int32)


def _launch(
    queries: Sequence[_Queries], kv: IntArray, kv_lens: list[int] | None, *, is_causal: bool
) -> Launch:
    start = queries[0].start
    return Launch(
        start=start,
        stop=queries[-1].stop,
        query_ends=[q.stop - start for q in queries],
        kv_ends=np.cumsum(kv_lens).tolist() if kv_lens else [len(kv)],
        kv=kv.astype(np.int32, copy=False),
        is_causal=is_causal,
    )


@dataclass(frozen=True)
class Reads:
    """The slots from which a shard reads the keys of a chunk, and the indices of each launch's
    keys.

    Attributes:
        own: [m], slots whose keys this shard reads and sends to all shards. ``m`` is the largest
            number of slots that any shard reads. The arrays of shards that read fewer slots are
            padded with slot 0. ``own`` is None if there is only one shard.
        launches: for each launch, the indices of its keys in the gathered keys. The gathered keys
            have the shape [number of shards * m]; the keys of shard 0 come first. If there is only
            one shard, no keys are gathered, and ``launches`` contains the slots of the keys.
    """

    own: IntArray | None
    launches: tuple[IntArray, ...]


def find_keys(chunk: KeyChunk, block_table: IntArray, shards: Shards, shard: int) -> Reads:
    """Return the slots from which a shard reads the keys of a chunk, and the indices of each
    launch's keys.

    Args:
        block_table: [num_reqs, num_blocks].
    """
    slots = shards.slots(block_table, chunk.requests, chunk.positions)
    if shards.count == 1:
        return Reads(None, tuple(slots[launch.kv] for launch in chunk.launches))
    owners = shards.owners(chunk.positions)
    shares = [np.flatnonzero(owners == each) for each in range(shards.count)]
    m = max(map(len, shares))
    rows = np.empty(len(slots), np.int32)
    for each, share in enumerate(shares):
        rows[share] = each * m + np.arange(len(share))
    own = np.zeros(m, np.int32)
    own[: len(shares[shard])] = slots[shares[shard]]
    return Reads(own, tuple(rows[launch.kv] for launch in chunk.launches))
