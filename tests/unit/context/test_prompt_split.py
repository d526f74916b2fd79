"""Laws: if ranks split prompts, every token is computed exactly once, and all ranks have about
equal work.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.prompt_split import (
    MAX_WHOLE_QUERIES,
    PromptSplit,
    largest_share,
    num_whole_requests,
    share_of_work,
)

QUERY_LENS = st.lists(st.integers(1, 80), max_size=8).map(lambda lens: np.array(lens, np.int32))
NUM_RANKS = st.integers(1, 5)


@given(QUERY_LENS, NUM_RANKS)
def test_whole_requests_run_everywhere_and_each_other_token_once(
    query_lens: np.ndarray, num_ranks: int
) -> None:
    split = PromptSplit.of(query_lens, num_ranks)
    shares = [split.tokens_of(rank) for rank in range(num_ranks)]
    whole = split.num_whole_tokens
    assert all(share[:whole].tolist() == list(range(whole)) for share in shares)
    others = np.concatenate([share[whole:] for share in shares])
    assert sorted(others.tolist()) == list(range(whole, int(query_lens.sum())))


@given(QUERY_LENS, NUM_RANKS)
def test_only_the_first_requests_run_whole_and_only_short_ones(
    query_lens: np.ndarray, num_ranks: int
) -> None:
    split = PromptSplit.of(query_lens, num_ranks)
    num_whole = int((np.cumsum(query_lens) <= split.num_whole_tokens).sum())
    assert (query_lens[:num_whole] <= MAX_WHOLE_QUERIES).all()
    assert num_whole == len(query_lens) or query_lens[num_whole] > MAX_WHOLE_QUERIES


@given(QUERY_LENS, NUM_RANKS)
def test_split_then_restore_is_the_identity(query_lens: np.ndarray, num_ranks: int) -> None:
    split = PromptSplit.of(query_lens, num_ranks)
    num_tokens = int(query_lens.sum())
    gathered = np.full((num_ranks, split.num_tokens), -1)
    for rank in range(num_ranks):
        share = split.tokens_of(rank)
        gathered[rank, : len(share)] = share
    owners, indices = split.places(num_tokens)
    assert gathered[owners, indices].tolist() == list(range(num_tokens))


@given(QUERY_LENS, NUM_RANKS)
def test_the_largest_share_is_known_without_the_pieces(
    query_lens: np.ndarray, num_ranks: int
) -> None:
    assert largest_share(query_lens, num_ranks) == PromptSplit.of(query_lens, num_ranks).num_tokens


@given(QUERY_LENS, NUM_RANKS)
def test_shares_differ_by_few_tokens(query_lens: np.ndarray, num_ranks: int) -> None:
    split = PromptSplit.of(query_lens, num_ranks)
    sizes = [len(split.tokens_of(rank)) for rank in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 2 * len(query_lens)


@given(st.integers(17, 4000), st.integers(0, 4000), st.integers(2, 8))
def test_shares_of_a_prompt_cost_the_same_under_causality(
    length: int, context: int, num_ranks: int
) -> None:
    split = PromptSplit.of(np.array([length], np.int32), num_ranks)
    lens = np.array([context]), np.array([length])
    work = [share_of_work(pieces, *lens) for pieces in split.pieces]
    assert sum(work) == length * context + length * (length + 1) // 2
    # Each rank has two chunks. The lengths of chunks differ by at most one token, and a token
    # attends to at most length + context keys.
    assert max(work) - min(work) <= 4 * (length + context)


def test_an_example() -> None:
    split = PromptSplit.of(np.array([1, 20, 17], np.int32), 2)
    assert split.num_whole_tokens == 1
    assert split.tokens_of(0).tolist() == [
        0,
        *range(1, 6),
        *range(16, 21),
        *range(21, 25),
        *range(33, 38),
    ]
    assert split.tokens_of(1).tolist() == [0, *range(6, 16), *range(25, 33)]
    assert split.num_tokens == 20


def test_the_work_of_a_long_prompt_does_not_overflow() -> None:
    length = np.array([1 << 20], np.int32)

    split = PromptSplit.of(length, 2)
    work = [share_of_work(pieces, np.zeros_like(length), length) for pieces in split.pieces]

    assert sum(work) == (1 << 19) * ((1 << 20) + 1)


def test_a_request_with_as_many_tokens_as_run_whole_is_not_split() -> None:
    most = MAX_WHOLE_QUERIES

    assert num_whole_requests(np.array([1, most, most + 1, 1], np.int32)) == 2
