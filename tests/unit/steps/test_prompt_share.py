"""Laws of steps that ranks split among themselves. The parts of all ranks together are the whole
step, and each rank finds the results of all requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.prompt_split import PromptSplit
from dist_aclgraph.context.shards import PADDING_SLOT, Shards
from dist_aclgraph.steps.direct_rows import direct_rows
from dist_aclgraph.steps.host_step import NO_STEP, HostStep
from dist_aclgraph.steps.prompt_share import share_prompts

LENS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=6)


def make_step(lens: list[tuple[int, int]]) -> HostStep:
    """Make a step of requests, each given as (number of queries, number of earlier tokens).

    A token's id is its index in the step.
    """
    queries, before = (np.array(column, np.int32) for column in zip(*lens, strict=True))
    ends = np.cumsum(queries, dtype=np.int32)
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(before - (ends - queries), queries)
    return replace(
        NO_STEP,
        rows=np.arange(len(lens), dtype=np.int32),
        token_ids=np.arange(ends[-1], dtype=np.int32),
        positions=positions.astype(np.int32),
        slots=100 + np.arange(ends[-1], dtype=np.int32),
        query_ends=ends,
        kv_lens=queries + before,
        sampled=np.arange(len(lens)),
        num_logits=np.ones(len(lens), np.int32),
        places=ends - 1,
    )


@given(LENS, st.integers(2, 4))
def test_ranks_run_the_step_between_them(lens: list[tuple[int, int]], num_ranks: int) -> None:
    step = make_step(lens)
    shares = [share_prompts(step, num_ranks, rank) for rank in range(num_ranks)]
    if shares[0].prompts is None:
        assert all(share is step for share in shares)
        return
    split = shares[0].prompts.split
    every = [token for share in shares for token in share.token_ids[split.num_whole_tokens :]]
    assert sorted(every) == list(range(split.num_whole_tokens, step.num_tokens))
    assert max(share.num_tokens for share in shares) == split.num_tokens
    for share in shares:
        assert (share.slots == 100 + share.token_ids).all()
        assert (share.positions == step.positions[share.token_ids]).all()


@given(LENS, st.integers(2, 4))
def test_all_new_keys_are_handed_round_and_written_once(
    lens: list[tuple[int, int]], num_ranks: int
) -> None:
    step = make_step(lens)
    shares = [share_prompts(step, num_ranks, rank) for rank in range(num_ranks)]
    for share in shares:
        if share.prompts is None:
            return
        written = share.prompts.written
        assert sorted(written[written != PADDING_SLOT]) == step.slots.tolist()
        tokens = np.full((num_ranks, share.prompts.split.num_tokens), -1)
        for row, other in zip(tokens, shares, strict=True):
            row[: other.num_tokens] = other.token_ids
        is_kept = written != PADDING_SLOT
        kept = tokens.ravel()[is_kept]
        assert (written[is_kept] == 100 + kept).all()
        assert (share.prompts.positions[is_kept] == step.positions[kept]).all()


@given(LENS, st.integers(2, 4))
def test_every_rank_finds_every_place(lens: list[tuple[int, int]], num_ranks: int) -> None:
    step = make_step(lens)
    shares = [share_prompts(step, num_ranks, rank) for rank in range(num_ranks)]
    for share in shares:
        if share.prompts is None:
            return
        owners, landings = share.prompts.owners, share.prompts.landings
        found = [shares[o].token_ids[i] for o, i in zip(owners, landings, strict=True)]
        assert found == step.places.tolist()
        # The places that this rank owns point at the right tokens in the rank's part of the step.
        own = owners == share.prompts.rank
        assert (share.token_ids[share.places][own] == step.places[own]).all()


@given(LENS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.booleans())
def test_direct_rows_see_the_keys_up_to_their_own(
    lens: list[tuple[int, int]], num_ranks: int, heads: int, interleave: int, takes_long: bool
) -> None:
    """For each row, the KV lengths on all shards add up to the number of positions up to the row's
    last query.
    """
    step = make_step(lens)
    for rank in range(num_ranks):
        share = share_prompts(step, num_ranks, rank)
        split = share.prompts.split if share.prompts else None
        if split is None:
            split = PromptSplit.of(np.diff(step.query_ends, prepend=np.int32(0)), 1)
        shards = Shards(4, heads * num_ranks, interleave)
        totals: dict[int, int] = {}
        for shard in range(shards.count):
            place = ContextPlace(shards, shard, num_ranks, rank)
            rows = direct_rows(share, split, place, takes_long_queries=takes_long)
            for index, (end, length) in enumerate(zip(rows.query_ends, rows.kv_lens, strict=True)):
                position = int(share.positions[end - 1])
                is_empty = place.is_sharded and position < shards.first_position(shard)
                totals[end] = totals.get(end, 0) + (0 if is_empty else length)
                request = index if rows.requests is None else int(rows.requests[index])
                token = int(share.token_ids[end - 1])
                assert token < step.query_ends[request]
                assert request == 0 or token >= step.query_ends[request - 1]
        assert totals == {end: int(share.positions[end - 1]) + 1 for end in totals}
