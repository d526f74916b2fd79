"""Silent hazards of captured graphs: each is refused, or shown here as what it is."""

from __future__ import annotations

import pytest
import torch

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.graph.task_update import TaskRecorder
from tests.graph.attention_rows import AttentionDecoder, grow, make_rows


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

    decoder._table.mul_(2.0)  # in place: the graph reads the same address

    assert not torch.equal(decoder.replay(graph, rows), before)
