"""A step whose prompts are split between prefill ranks: the tokens that one rank runs (its share),
and the ranks that run all other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.prompt_split import PromptSplit
from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.steps.host_step import HostStep


@dataclass(frozen=True)
class PromptShare:
    """The facts that one rank must know about the tokens of other prefill ranks.

    Attributes:
        rank: the prefill rank that uses this object.
        written: [ranks * num_tokens], for each token of each rank, the slot of this rank's cache to
            which the token's KV is written. The tokens of rank 0 come first, then the tokens of
            rank 1, and so on. If all ranks run a token, the token has one element for each rank.
            Only the element of this rank contains a slot.
        positions: [ranks * num_tokens], positions of the tokens to which ``written`` belongs.
        owners: [num_places], the rank that runs each place. A place is a token of the step after
            which a token is sampled.
        landings: [num_places], index of each place among the tokens of the rank in ``owners``.
    """

    split: PromptSplit
    rank: int
    written: IntArray
    positions: IntArray
    owners: IntArray
    landings: IntArray


def share_prompts(step: HostStep, num_ranks: int, rank: int) -> HostStep:
    """Return one rank's share of a step, or the step itself if no prompt is long enough to be
    split.

    The share is a step with all requests, but only the tokens that ``rank`` runs. In ``places``,
    the index of a token that another rank runs is 0.
    """
    if num_ranks == 1 or not len(step.rows):
        return step
    split = PromptSplit.of(np.diff(step.query_ends, prepend=np.int32(0)), num_ranks)
    if split.num_whole_tokens == step.num_tokens:
        return step
    shares = [split.tokens_of(each) for each in range(num_ranks)]
    owners, indices = (column[step.places] for column in split.places(step.num_tokens))
    owners = np.where(step.places < split.num_whole_tokens, rank, owners).astype(np.int32)
    is_own = owners == rank
    places = np.where(is_own, indices, 0).astype(np.int32)
    own, drafts = shares[rank], step.drafts
    return replace(
        step,
        token_ids=step.token_ids[own],
        positions=step.positions[own],
        slots=step.slots[own],
        places=places,
        next_tokens=step.next_tokens[own] if len(step.next_tokens) else step.next_tokens,
        drafts=None
        if drafts is None
        else replace(drafts, places=places.reshape(-1, drafts.places.shape[1])),
        prompts=PromptShare(
            split,
            rank,
            _written(step.slots, shares, split, rank),
            _side_by_side(step.positions, shares, split.num_tokens, 0),
            owners,
            indices,
        ),
    )


def _written(slots: IntArray, shares: list[IntArray], split: PromptSplit, rank: int) -> IntArray:
    written = _side_by_side(slots, shares, split.num_tokens, PADDING_SLOT)
    by_rank = written.reshape(len(shares), -1)
    others = np.arange(len(shares)) != rank
    by_rank[others, : split.num_whole_tokens] = PADDING_SLOT
    return written


def _side_by_side(values: IntArray, shares: list[IntArray], length: int, padding: int) -> IntArray:
    """Return the values of all ranks' tokens, rank by rank. The values of each rank are padded to
    ``length``.
    """
    table = np.full((len(shares), length), padding, np.int32)
    for row, share in zip(table, shares, strict=True):
        row[: len(share)] = values[share]
    return table.ravel()
