"""Decides which tokens of a step each prefill rank runs.

Requests with few tokens come first in the step. Every rank runs all tokens of these requests. Each
later request is cut into twice as many chunks as there are ranks. If n is the number of ranks, rank
r runs the chunks with the indices r and 2 * n - 1 - r. With causal attention, the cost of these two
chunks together is the same on every rank. Chunk lengths differ by at most one token; a chunk can be
empty. Every rank pads its tokens to the number of tokens of the rank with the most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_aclgraph.arrays.ints import IntArray

MAX_WHOLE_QUERIES = 16  # A request with at most 16 tokens in a step runs on all ranks.


def num_whole_requests(query_lens: IntArray, max_queries: int = MAX_WHOLE_QUERIES) -> int:
    """Return how many requests precede the first request with more than ``max_queries`` tokens."""
    too_long = np.flatnonzero(query_lens > max_queries)
    return int(too_long[0]) if len(too_long) else len(query_lens)


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one request that one rank runs.

    Attributes:
        request: index of the request in the batch.
        start, stop: range of the tokens among all tokens of the step.
    """

    request: int
    start: int
    stop: int


@dataclass(frozen=True)
class PromptSplit:
    """The division of one step's tokens among the ranks.

    Attributes:
        num_whole_tokens: number of tokens that every rank runs. These are the first tokens of the
            step.
        pieces: for each rank, the pieces of requests that the rank runs, in the order of the rank's
            tokens.
    """

    num_whole_tokens: int
    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(
        cls, query_lens: IntArray, num_ranks: int, max_queries: int = MAX_WHOLE_QUERIES
    ) -> PromptSplit:
        """Split a step.

        Args:
            query_lens: [num_reqs], number of tokens of each request in the step.
            max_queries: the requests before the first request with more than this number of tokens
                are not split. That request and all requests after it are split.
        """
        ends = np.cumsum(query_lens, dtype=np.int32)
        num_whole = num_whole_requests(query_lens, max_queries)
        shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
        for request in range(num_whole, len(query_lens)):
            length, end = int(query_lens[request]), int(ends[request])
            bounds = [end - length + bound for bound in _bounds(length, num_ranks).tolist()]
            for rank, share in enumerate(shares):
                low, high = bounds[rank : rank + 2], bounds[2 * num_ranks - 1 - rank :][:2]
                chunks = [(low[0], high[1])] if low[1] == high[0] else [low, high]
                share += [Piece(request, *chunk) for chunk in chunks if chunk[0] < chunk[1]]
        whole = int(ends[num_whole - 1]) if num_whole else 0
        return cls(whole, tuple(tuple(share) for share in shares))

    @property
    def num_ranks(self) -> int:
        return len(self.pieces)

    def tokens_of(self, rank: int) -> IntArray:
        """Return the indices of the step's tokens that a rank runs, in the rank's order."""
        parts = [np.arange(self.num_whole_tokens, dtype=np.int32)]
        parts += [np.arange(p.start, p.stop, dtype=np.int32) for p in self.pieces[rank]]
        return np.concatenate(parts)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the rank with the most tokens. All ranks pad their tokens to this
        number.
        """
        shares = (sum(p.stop - p.start for p in share) for share in self.pieces)
        return self.num_whole_tokens + max(shares)

    def places(self, num_tokens: int) -> tuple[IntArray, IntArray]:
        """Return two arrays with one element for each token of the step. The first array contains a
        rank that runs the token. The second array contains the token's index on this rank.

        For a token that all ranks run, the rank is 0.
        """
        owners = np.zeros(num_tokens, np.int32)
        indices = np.arange(num_tokens, dtype=np.int32)
        for rank, share in enumerate(self.pieces):
            index = self.num_whole_tokens
            for piece in share:
                length = piece.stop - piece.start
                owners[piece.start : piece.stop] = rank
                indices[piece.start : piece.stop] = np.arange(index, index + length)
                index += length
        return owners, indices


def largest_share(query_lens: IntArray, num_ranks: int) -> int:
    """Return ``PromptSplit.of(query_lens, num_ranks).num_tokens`` without computing the pieces."""
    if num_ranks == 1:
        return int(query_lens.sum())
    num_whole = num_whole_requests(query_lens)
    bounds = _bounds(query_lens[num_whole:, None].astype(np.int64), num_ranks)
    chunks = np.diff(bounds, axis=-1).sum(0)
    return int(query_lens[:num_whole].sum() + (chunks + chunks[::-1])[:num_ranks].max(initial=0))


def _bounds(length: IntArray | int, num_ranks: int) -> IntArray:
    """Return the positions where the chunks of ``length`` tokens begin, then the end of the last
    chunk: [..., 2 * num_ranks + 1].
    """
    bounds = length * np.arange(2 * num_ranks + 1) // (2 * num_ranks)
    return bounds.astype(np.int32)


def share_of_work(pieces: Sequence[Piece], context: IntArray, ends: IntArray) -> int:
    """Return the number of attention scores for these pieces. Attention computes one score for each
    pair of a query and a key to which the query attends.

    Args:
        context: [num_reqs], for each request, the number of its tokens that earlier steps have
            computed.
        ends: [num_reqs], cumulative query lengths.
    """
    total = 0
    for piece in pieces:
        length = piece.stop - piece.start
        begin = int(ends[piece.request - 1]) if piece.request else 0
        first = int(context[piece.request]) + piece.start - begin
        total += length * first + length * (length + 1) // 2
    return total
