"""The rows of a step whose attention reads the paged cache directly, through block tables. All
functions are pure.

If the cache is sharded, a row is a token. If the cache is not sharded but prompts are split between
ranks, a row is a piece of a request. In all other cases, a row is a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.prompt_split import PromptSplit
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import shard_lens


@dataclass(frozen=True)
class DirectRows:
    """The rows of a rank whose attention reads the paged cache directly, through block tables. The
    tokens of these rows are the first tokens that the rank runs in the step.

    Attributes:
        query_ends: [num_rows], cumulative query lengths.
        kv_lens: [num_rows], the row's last query attends to this number of the shard's keys; at
            least one.
        requests: [num_rows], for each row, the index of the request whose blocks the row reads;
            None if each row i reads the blocks of request i.
    """

    query_ends: list[int]
    kv_lens: list[int]
    requests: IntArray | None = None

    @property
    def num_tokens(self) -> int:
        return self.query_ends[-1] if self.query_ends else 0


def direct_rows(
    step: HostStep, split: PromptSplit, place: ContextPlace, *, takes_long_queries: bool
) -> DirectRows:
    """Return the rows of a step whose attention reads the paged cache directly.

    Args:
        split: the division of the step's prompts among ranks.
        takes_long_queries: whether attention also reads the cache directly for requests with many
            query tokens.
    """
    if place.is_sharded:
        return _tokens(step, split, place)
    ends, kv_lens = step.query_ends, step.kv_lens
    if takes_long_queries and step.prompts is not None:
        return _pieces(step, split, place.prompt_rank)
    count = len(ends) if takes_long_queries else _num_whole(step, split)
    return DirectRows(ends[:count].tolist(), kv_lens[:count].tolist())


def _num_whole(step: HostStep, split: PromptSplit) -> int:
    return int(np.searchsorted(step.query_ends, split.num_whole_tokens, "right"))


def _tokens(step: HostStep, split: PromptSplit, place: ContextPlace) -> DirectRows:
    num_tokens, count = split.num_whole_tokens, _num_whole(step, split)
    lens = shard_lens(place, step.positions[:num_tokens] + 1).tolist()
    requests = None
    if num_tokens > count:
        query_lens = np.diff(step.query_ends[:count], prepend=np.int32(0))
        requests = np.repeat(np.arange(count, dtype=np.int32), query_lens)
    return DirectRows(list(range(1, num_tokens + 1)), lens, requests)


def _pieces(step: HostStep, split: PromptSplit, rank: int) -> DirectRows:
    count, pieces = _num_whole(step, split), split.pieces[rank]
    ends, kv_lens = step.query_ends, step.kv_lens
    owners = np.array([piece.request for piece in pieces], np.int32)
    lens = np.array([piece.stop - piece.start for piece in pieces], np.int32)
    # For each piece, how many of the request's keys come after the last key to which the piece
    # attends.
    behind = ends[owners] - np.array([piece.stop for piece in pieces], np.int32)
    return DirectRows(
        ends[:count].tolist() + (split.num_whole_tokens + np.cumsum(lens)).tolist(),
        kv_lens[:count].tolist() + (kv_lens[owners] - behind).tolist(),
        np.concatenate([np.arange(count, dtype=np.int32), owners]),
    )
