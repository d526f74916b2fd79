"""Mistakes with captured graphs that raise no error of their own: each is refused, or a test shows
its effect.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dist_aclgraph.device.npu import weak_reference
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.graphs.task_update import TaskRecorder
from tests.graphs.attention_rows import AttentionDecoder, grow, make_rows


def test_lengths_of_an_earlier_step_give_wrong_attention(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(2), make_rows(2)
    for step in range(5):
        decoder.replay(graph, rows)
        grow(rows, step)

    stale = decoder.replay(graph, rows, kv_lens=[1, 1])

    assert not torch.allclose(stale, decoder.expected(rows), atol=1e-2)


def test_an_output_view_shows_the_next_replay(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(1), make_rows(1)
    decoder.replay(graph, rows)
    view = decoder.buffers.logits[:1]
    first = view.cpu()

    grow(rows, 0)
    decoder.replay(graph, rows)

    assert not torch.equal(view.cpu(), first)


def test_a_python_branch_is_frozen_at_capture(decoder: AttentionDecoder) -> None:
    doubled = [True]

    def forward(tasks: TaskRecorder) -> None:
        decoder.forward(1, tasks)
        if doubled[0]:
            decoder.buffers.logits[:1].mul_(2.0)

    graph, rows = decoder.capture(1, forward), make_rows(1)
    doubled[0] = False

    out = decoder.replay(graph, rows)

    torch.testing.assert_close(out, 2 * decoder.expected(rows), rtol=1e-4, atol=1e-5)


def test_a_host_read_inside_a_capture_is_refused(decoder: AttentionDecoder) -> None:
    def forward(tasks: TaskRecorder) -> None:
        decoder.forward(1, tasks)
        decoder.buffers.logits[0, 0].item()

    with pytest.raises(DistAclGraphError, match="capturing full decode 1"):
        decoder.capture(1, forward)


def test_changed_weights_are_seen_by_the_next_replay(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(1), make_rows(1)
    before = decoder.replay(graph, rows)

    decoder._table.mul_(2.0)  # the table is changed in place, so the graph reads the new values

    assert not torch.equal(decoder.replay(graph, rows), before)


def test_graphs_share_addresses_so_an_output_left_in_the_pool_is_lost(
    decoder: AttentionDecoder,
) -> None:
    first = torch.full((64, 64), 1.0, device=decoder.npu.device)
    second = torch.full((32, 64), 2.0, device=decoder.npu.device)
    outputs: list[torch.Tensor] = []
    graphs = [
        decoder.recording.record("f", lambda: outputs.append(weak_reference(first + first))),
        decoder.recording.record("g", lambda: outputs.append(weak_reference(second + second))),
    ]

    graphs[0].replay()
    before = outputs[0].cpu().clone()
    graphs[1].replay()
    after = outputs[0].cpu()

    assert outputs[0].data_ptr() == outputs[1].data_ptr()
    assert torch.equal(before, torch.full((64, 64), 2.0))
    assert torch.equal(after[:32], torch.full((32, 64), 4.0))
    assert decoder.pool.memory().live_bytes == 0
    for graph in graphs:
        decoder.recording.forget(graph)


def test_whatever_order_graphs_are_captured_and_replayed_in_rows_stay_right(
    decoder: AttentionDecoder,
) -> None:
    random = np.random.default_rng(3)
    graphs = {int(bucket): decoder.capture(int(bucket)) for bucket in random.permutation(8) + 1}
    rows = make_rows(8)

    for step in range(200):
        live = rows[: random.integers(1, 9)]
        bucket = int(random.integers(len(live), 9))
        if len(live[0].tokens) >= 100:
            rows = make_rows(8, seed=step)
            live = rows[: len(live)]
        out = decoder.replay(graphs[bucket], live)
        torch.testing.assert_close(out, decoder.expected(live), rtol=1e-4, atol=1e-5)
        grow(live, step)
