from __future__ import annotations

import pytest
import torch

from dist_aclgraph.errors import ReplayMismatchError
from tests.graphs.attention_rows import AttentionDecoder, grow, make_buffers, make_rows, slot
from tests.plans import decode_graph

BUCKET = 4


@pytest.mark.parametrize("num_rows", [1, BUCKET - 1, BUCKET])
def test_replay_equals_plain_attention_across_block_boundaries(
    decoder: AttentionDecoder, num_rows: int
) -> None:
    graph, rows = decoder.capture(BUCKET), make_rows(num_rows)

    for step in range(70):  # so that rows grow beyond two multiples of 32
        out = decoder.replay(graph, rows)

        torch.testing.assert_close(out, decoder.expected(rows), rtol=1e-4, atol=1e-5)
        grow(rows, step)


def test_rows_that_join_and_leave_do_not_disturb_the_others(decoder: AttentionDecoder) -> None:
    graphs = {bucket: decoder.capture(bucket) for bucket in (8, 4, 2, 1)}
    rows = make_rows(8)

    for step, count in enumerate([1, 2, 3, 4, 5, 8, 7, 4, 3, 2, 1, 8, 1, 8]):
        live = rows[8 - count :] if step % 2 else rows[:count]
        bucket = min(size for size in graphs if size >= count)
        out = decoder.replay(graphs[bucket], live)

        torch.testing.assert_close(out, decoder.expected(live), rtol=1e-4, atol=1e-5)
        grow(live, step)


def test_replay_refuses_buffers_that_it_was_not_captured_on(decoder: AttentionDecoder) -> None:
    graph = decoder.capture(BUCKET)
    other = make_buffers(decoder.npu)

    with pytest.raises(ReplayMismatchError, match="buffers"):
        decoder.replay(graph, make_rows(1), addresses=other.addresses)


@pytest.mark.parametrize("count", [BUCKET - 1, BUCKET + 1])
def test_replay_refuses_another_number_of_lengths(decoder: AttentionDecoder, count: int) -> None:
    graph = decoder.capture(BUCKET)

    with pytest.raises(ReplayMismatchError, match="full decode 4"):
        decoder.replay(graph, make_rows(1), kv_lens=[1] * count)


def test_replay_refuses_query_ends_of_another_batch(decoder: AttentionDecoder) -> None:
    graph = decoder.capture(BUCKET)

    with pytest.raises(ReplayMismatchError):
        decoder.replay(graph, make_rows(1), ends=[1, 2, 3, 5])


def test_a_refused_replay_leaves_the_graph_usable(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(BUCKET), make_rows(2)
    with pytest.raises(ReplayMismatchError):
        decoder.replay(graph, rows, kv_lens=[1])

    out = decoder.replay(graph, rows)

    torch.testing.assert_close(out, decoder.expected(rows), rtol=1e-4, atol=1e-5)


def test_padding_rows_write_nowhere(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(8), make_rows(8)
    decoder.replay(graph, rows)  # all rows are live; in the next replay, some are padding
    live = rows[2:5]
    grow(live, 0)
    decoder.cache.keys.fill_(7.0)  # a value that no row writes
    decoder.cache.values.fill_(7.0)
    before = decoder.cache.keys.cpu().clone(), decoder.cache.values.cpu().clone()

    decoder.replay(graph, live)

    after = decoder.cache.keys.cpu(), decoder.cache.values.cpu()
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(2).any(-1).flatten().nonzero().flatten()
        assert sorted(changed.tolist()) == sorted(slot(row) for row in live)


def test_rows_that_left_name_the_dummy_block_again(decoder: AttentionDecoder) -> None:
    rows = make_rows(8)
    decoder.write(8, rows)

    decoder.write(4, rows[:3])

    table = decoder.buffers.inputs(decode_graph(8)).block_table.cpu()
    assert table[:3].tolist() == [row.blocks for row in rows[:3]]
    assert not table[3:].any()


def test_the_workspace_of_the_capture_serves_the_longest_lengths(
    decoder: AttentionDecoder,
) -> None:
    graph, rows = decoder.capture(1), make_rows(1)

    for step in range(127):
        decoder.replay(graph, rows)
        grow(rows, step)
    out = decoder.replay(graph, rows)

    assert len(rows[0].tokens) == 128
    torch.testing.assert_close(out, decoder.expected(rows), rtol=1e-4, atol=1e-5)
