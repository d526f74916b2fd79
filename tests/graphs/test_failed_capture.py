from __future__ import annotations

import gc

import pytest
import torch

from dist_aclgraph.errors import CaptureError, DistAclGraphError, StreamExhaustedError
from dist_aclgraph.graphs.task_update import TaskRecorder
from tests.graphs.attention_rows import AttentionDecoder, make_rows
from tests.streams import HeldStreams


def fail_with_a_host_read(decoder: AttentionDecoder, bucket: int) -> None:
    def forward(tasks: TaskRecorder) -> None:
        decoder.forward(bucket, tasks)
        decoder.buffers.logits[0, 0].item()

    with pytest.raises(DistAclGraphError):
        decoder.capture(bucket, forward)


def test_streams_are_back_after_a_failed_capture(decoder: AttentionDecoder) -> None:
    decoder.capture(1).release()
    before = decoder.npu.available_streams()

    for _ in range(3):
        fail_with_a_host_read(decoder, 4)

    assert decoder.npu.available_streams() == before


def test_memory_is_back_after_a_capture_that_cannot_end(decoder: AttentionDecoder) -> None:
    decoder.capture(4).release()
    decoder.npu.give_back()
    before = decoder.npu.memory().free_bytes

    def forward(tasks: TaskRecorder) -> None:
        decoder.forward(4, tasks)
        large = torch.zeros(64 << 20, dtype=torch.int8, device="npu")
        main, side = torch.npu.current_stream(), torch.npu.Stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            large.add_(1)  # the main stream never waits for this stream, so the capture fails

    with pytest.raises(CaptureError, match="107025"):
        decoder.capture(4, forward)

    decoder.npu.give_back()
    assert decoder.npu.memory().free_bytes == before
    decoder.capture(4).release()


def test_a_capture_after_a_failed_one_works(decoder: AttentionDecoder) -> None:
    fail_with_a_host_read(decoder, 4)

    graph, rows = decoder.capture(4), make_rows(3)

    torch.testing.assert_close(
        decoder.replay(graph, rows), decoder.expected(rows), rtol=1e-4, atol=1e-5
    )


def test_graphs_captured_before_a_failure_still_replay(decoder: AttentionDecoder) -> None:
    graph, rows = decoder.capture(4), make_rows(3)

    fail_with_a_host_read(decoder, 2)

    torch.testing.assert_close(
        decoder.replay(graph, rows), decoder.expected(rows), rtol=1e-4, atol=1e-5
    )


def test_an_error_of_our_own_inside_a_capture_keeps_its_type(decoder: AttentionDecoder) -> None:
    def forward(tasks: TaskRecorder) -> None:
        decoder.forward(1, tasks)
        raise CaptureError("a rule of ours")

    with pytest.raises(CaptureError, match="a rule of ours"):
        decoder.capture(1, forward)

    decoder.capture(1).release()


def test_streams_come_back_with_every_release(decoder: AttentionDecoder) -> None:
    decoder.capture(1).release()
    gc.collect()  # Graphs of earlier tests release their streams now, and not later.
    before = decoder.npu.available_streams()

    graphs = [decoder.capture(bucket) for bucket in (8, 4, 2)]
    assert decoder.npu.available_streams() < before
    for graph in graphs:
        graph.release()

    assert decoder.npu.available_streams() == before


def test_a_capture_that_cannot_begin_is_recovered_from(decoder: AttentionDecoder) -> None:
    kept, rows = decoder.capture(4), make_rows(3)
    pool = decoder.pool.handle
    with HeldStreams(left=0):
        for _ in range(2):
            with pytest.raises(StreamExhaustedError, match="207008"):
                decoder.capture(2)

    graph = decoder.capture(2)

    assert decoder.pool.handle == pool
    for replayed, batch in ((kept, rows), (graph, make_rows(2))):
        torch.testing.assert_close(
            decoder.replay(replayed, batch), decoder.expected(batch), rtol=1e-4, atol=1e-5
        )
