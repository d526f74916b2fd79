"""Laws of padding: what a step's lengths become in a graph."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.padding import pad_lens, padding_blocks

MAX_SEQS = 16


@st.composite
def mixed_steps(draw: st.DrawFn) -> tuple[BatchDescriptor, list[int], list[int]]:
    """A graph for mixed batches, and the query and earlier lengths of requests that fit in it."""
    queries = draw(st.lists(st.integers(1, 40), max_size=MAX_SEQS))
    bucket = sum(queries) + draw(st.integers(0 if queries else 1, 60))
    earlier = draw(st.lists(st.integers(0, 99), min_size=len(queries), max_size=len(queries)))
    return BatchDescriptor(bucket, min(bucket, MAX_SEQS) + 1, 0, "FULL"), queries, earlier


def padded(graph: BatchDescriptor, queries: list[int], earlier: list[int]):
    ends = np.cumsum(np.array(queries, np.int32), dtype=np.int32)
    kv_lens = np.array(earlier, np.int32) + np.array(queries, np.int32)
    return pad_lens(graph, ends, kv_lens), ends.tolist(), kv_lens.tolist()


@given(mixed_steps())
def test_a_mixed_step_fills_the_graph_and_keeps_its_own_lengths(step) -> None:
    graph, queries, earlier = step

    (ends, kv_lens), live_ends, live_lens = padded(graph, queries, earlier)

    assert len(ends) == len(kv_lens) == graph.num_reqs
    assert ends[-1] == graph.num_tokens
    assert ends == sorted(ends)
    assert ends[: len(queries)] == live_ends
    assert kv_lens[: len(queries)] == live_lens
    lengths = np.diff([0, *ends])
    assert all(kv >= max(1, q) for kv, q in zip(kv_lens, lengths, strict=True))


@given(mixed_steps())
def test_padding_tokens_are_shared_out_evenly(step) -> None:
    graph, queries, earlier = step

    (ends, _), _, _ = padded(graph, queries, earlier)

    pads = np.diff([0, *ends])[len(queries) :]
    left = graph.num_tokens - sum(queries)
    assert pads.sum() == left
    assert pads.max() <= -(-left // len(pads))


@given(st.integers(1, 4), st.integers(1, MAX_SEQS), st.data())
def test_a_decode_step_keeps_the_query_length_of_every_request(q: int, num_reqs: int, data) -> None:
    graph = BatchDescriptor(num_reqs * q, num_reqs, q, "FULL")
    earlier = data.draw(st.lists(st.integers(0, 99), max_size=num_reqs))

    (ends, kv_lens), live_ends, live_lens = padded(graph, [q] * len(earlier), earlier)

    assert np.diff([0, *ends]).tolist() == [q] * num_reqs
    assert ends[: len(earlier)] == live_ends
    assert kv_lens[: len(earlier)] == live_lens
    assert kv_lens[len(earlier) :] == [q] * (num_reqs - len(earlier))


@given(mixed_steps(), st.sampled_from((1, 4, 16)))
def test_padding_stands_for_no_fewer_blocks_than_its_lengths(step, block_size: int) -> None:
    graph, queries, earlier = step

    (_, kv_lens), _, _ = padded(graph, queries, earlier)

    needed = sum(-(-length // block_size) for length in kv_lens[len(queries) :])
    assert needed <= padding_blocks(graph, sum(queries), len(queries), block_size)


def test_a_padding_request_of_a_decode_graph_stands_for_one_block() -> None:
    assert padding_blocks(BatchDescriptor(16, 8, 2, "FULL"), 10, 5, 128) == 3
    assert padding_blocks(BatchDescriptor(16, 8, 2, "FULL"), 16, 8, 128) == 0
