"""Laws of padding: the lengths that a step gets when it runs in a graph."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.padding import GraphLens, padding_blocks, padding_len

MAX_SEQS = 16


@st.composite
def mixed_steps(draw: st.DrawFn) -> tuple[BatchDescriptor, list[int], list[int]]:
    """Draw a graph for mixed batches, and requests that fit in the graph.

    Return the graph, and for each request its number of queries and its number of earlier tokens.
    """
    queries = draw(st.lists(st.integers(1, 40), max_size=MAX_SEQS))
    bucket = sum(queries) + draw(st.integers(0 if queries else 1, 60))
    earlier = draw(st.lists(st.integers(0, 99), min_size=len(queries), max_size=len(queries)))
    return BatchDescriptor(bucket, min(bucket, MAX_SEQS) + 1, 0, "FULL"), queries, earlier


def padded(graph: BatchDescriptor, queries: list[int], earlier: list[int]):
    ends = np.cumsum(np.array(queries, np.int32), dtype=np.int32)
    kv_lens = np.array(earlier, np.int32) + np.array(queries, np.int32)
    found = GraphLens(ContextPlace(Shards(128))).pad(graph, ends, kv_lens)
    return (found.query_ends, found.kv_lens[0]), ends.tolist(), kv_lens.tolist()


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


@given(st.sampled_from([1, 2, 4]), st.integers(2, 4), st.integers(0, 3), st.data())
def test_where_caches_are_sharded_each_token_has_its_own_length_on_each_shard(
    interleave: int, count: int, k: int, data: st.DataObject
) -> None:
    num_reqs, q = data.draw(st.integers(1, 6)), k + 1
    live = data.draw(st.lists(st.integers(q, 60), max_size=num_reqs))
    graph = BatchDescriptor(num_reqs * q, num_reqs, q, "FULL")
    lens = np.array(live, np.int32)
    shards = Shards(8, count, interleave)
    found = [
        GraphLens(ContextPlace(shards, shard), k).pad(graph, q * np.arange(1, len(live) + 1), lens)
        for shard in range(count)
    ]

    for each in found:
        assert each.query_ends == list(range(1, graph.num_tokens + 1))
        assert len(each.kv_lens) == max(1, k)
    for ahead in range(max(1, k)):
        seen = [length - k + index + ahead for length in live for index in range(q)]
        rows = [each.kv_lens[ahead] for each in found]
        assert all(len(row) == graph.num_tokens and min(row) >= 1 for row in rows)
        for token, length in enumerate(seen):
            kept = [row[token] for row in rows]
            empty = [length <= shards.first_position(shard) for shard in range(count)]
            assert sum(kept) - sum(empty) == length  # an empty shard has length 1, not 0


@given(mixed_steps(), st.sampled_from((1, 4, 16)))
def test_padding_stands_for_its_longest_length_and_for_enough_blocks(step, block_size: int) -> None:
    graph, queries, earlier = step

    (_, kv_lens), _, _ = padded(graph, queries, earlier)

    padding = kv_lens[len(queries) :]
    needed = sum(-(-length // block_size) for length in padding)
    assert padding_len(graph, sum(queries), len(queries)) == max(padding, default=0)
    assert needed <= padding_blocks(graph, sum(queries), len(queries), block_size)


def test_a_padding_request_of_a_decode_graph_stands_for_one_block() -> None:
    assert padding_blocks(BatchDescriptor(16, 8, 2, "FULL"), 10, 5, 128) == 3
    assert padding_blocks(BatchDescriptor(16, 8, 2, "FULL"), 16, 8, 128) == 0


def test_a_step_that_was_guessed_is_not_padded_again_where_caches_are_sharded() -> None:
    graph, kv_lens = BatchDescriptor(4, 4, 1, "FULL"), np.array([5, 9], np.int32)
    graph_lens = GraphLens(ContextPlace(Shards(8, 2)))

    guessed = graph_lens.pad(graph, kv_lens, kv_lens)

    assert graph_lens.pad(graph, kv_lens, kv_lens.copy()) is guessed
    assert graph_lens.pad(graph, kv_lens, kv_lens + 2) != guessed
    assert graph_lens.pad(graph, kv_lens, kv_lens) == guessed
    other = graph_lens.pad(BatchDescriptor(8, 8, 1, "FULL"), kv_lens, kv_lens)
    assert len(other.query_ends) == 8
