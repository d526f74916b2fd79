"""The forms of latent attention: whatever the step, every query sees its own context, once."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.layers.latent_forms import MAX_ABSORBED_QUERIES, Forms, choose_forms, kv_slots_of

# (queries, tokens before them) of each request
steps = st.lists(
    st.tuples(st.one_of(st.integers(1, 16), st.integers(1, 60)), st.integers(0, 120)),
    min_size=1,
    max_size=8,
)


def forms_of(step: list[tuple[int, int]], max_tokens: int) -> Forms:
    ends = list(accumulate(query_len for query_len, _ in step))
    return choose_forms(ends, [sum(lens) for lens in step], max_tokens=max_tokens)


def visible_tokens(forms: Forms) -> dict[int, list[int]]:
    """Map each plain query token to the KV tokens that it sees, as a chunk's operator has it."""
    seen: dict[int, list[int]] = {}
    for part in forms.plain:
        for chunk in part.chunks:
            q_start, kv_start = 0, 0
            for q_end, kv_end in zip(chunk.query_ends, chunk.kv_ends, strict=True):
                for q in range(q_start, q_end):
                    stop = kv_end - (q_end - 1 - q) if chunk.is_causal else kv_end
                    tokens = range(chunk.start + kv_start, chunk.start + stop)
                    seen.setdefault(part.start + q, []).extend(tokens)
                q_start, kv_start = q_end, kv_end
            assert kv_start == chunk.stop - chunk.start
            assert q_start == part.stop - part.start
    return seen


@given(steps, st.integers(1, 100))
def test_every_plain_query_sees_its_own_context_and_nothing_else(
    step: list[tuple[int, int]], max_tokens: int
) -> None:
    forms = forms_of(step, max_tokens)

    expected, kv_start = {}, 0
    token = sum(query_len for query_len, _ in step[: forms.num_absorbed])
    for query_len, before in step[forms.num_absorbed :]:
        for q in range(query_len):
            expected[token + q] = list(range(kv_start, kv_start + before + q + 1))
        token, kv_start = token + query_len, kv_start + before + query_len
    assert visible_tokens(forms) == expected


@given(steps, st.integers(1, 100))
def test_no_chunk_makes_more_keys_than_the_limit_or_one_requests_queries(
    step: list[tuple[int, int]], max_tokens: int
) -> None:
    longest = max(query_len for query_len, _ in step)

    for part in forms_of(step, max_tokens).plain:
        for chunk in part.chunks:
            assert chunk.stop - chunk.start <= max(max_tokens, longest)


@given(steps)
def test_requests_are_absorbed_up_to_the_first_with_too_many_queries(
    step: list[tuple[int, int]],
) -> None:
    n = forms_of(step, 50).num_absorbed

    assert all(query_len <= MAX_ABSORBED_QUERIES for query_len, _ in step[:n])
    assert n == len(step) or step[n][0] > MAX_ABSORBED_QUERIES


def test_a_decode_step_is_absorbed_whole() -> None:
    assert forms_of([(1, 5000), (1, 0), (2, 7)], 100) == Forms(3, ())


def test_slots_follow_the_block_table() -> None:
    table = np.array([[7, 2, 0], [4, 1, 3]], np.int32)

    slots = kv_slots_of(table, [3, 5], 2)

    assert slots.dtype == np.int32
    assert slots.tolist() == [14, 15, 4, 8, 9, 2, 3, 6]
