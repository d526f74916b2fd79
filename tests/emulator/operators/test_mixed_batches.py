"""Attention in full graphs of mixed batches: requests without queries, padding, and updated
lengths.
"""

import pytest
import torch
import torch_npu

from tests.emulator.compare import assert_close
from tests.emulator.paged import CAUSAL, Pages, paged_arguments, paged_attention, reference

HEADS, KV_HEADS, DIM = 4, 2, 64


def make(rows, lengths, dtype=torch.float16):
    return torch.randn(sum(rows), HEADS, DIM).to(dtype), Pages(lengths, KV_HEADS, DIM, 16, dtype)


def assert_causal(out, query, pages, rows, lengths):
    """Assert that the results of each request equal those of causal attention in plain torch."""
    start = 0
    for b, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        part = slice(start, start + n)
        start += n
        keys, values = (
            pages.table_tokens(cache, b, length) for cache in (pages.keys, pages.values)
        )
        if n:
            assert_close(out[part], reference(query[part], keys, values, HEADS, KV_HEADS, True)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,lengths",
    [
        ([3, 0, 40, 1, 0, 1], [3, 0, 140, 70, 9, 1]),  # some requests have no query
        ([0, 0, 2], [0, 5, 2]),
        ([5, 1, 4, 6, 0, 0, 0, 0], [30, 17, 4, 6, 0, 0, 0, 0]),  # the last requests are padding
    ],
)
def test_mixed_batches(dtype, rows, lengths):
    query, pages = make(rows, lengths, dtype)
    out, _ = paged_attention(
        query, pages, rows, HEADS, KV_HEADS, sparse_mode=3, atten_mask=CAUSAL.npu()
    )
    assert_causal(out, query, pages, rows, lengths)


class CapturedAttention:
    """A captured attention task for 12 tokens and 4 requests."""

    def __init__(self, rows, lengths):
        self.query, self.pages = make(rows, [200] * len(rows))
        self.arguments = paged_arguments(
            self.query, self.pages, rows, HEADS, KV_HEADS, sparse_mode=3, atten_mask=CAUSAL.npu()
        )
        self.arguments["actual_seq_lengths_kv"] = lengths
        sizing = torch_npu._npu_fused_infer_attention_score_get_max_workspace
        self.workspace = sizing(**self.arguments)
        self.out = torch.empty_like(self.arguments["query"])
        self.lse = torch.empty(1, dtype=torch.float32, device="npu")
        self.stream, self.event = torch.npu.Stream(), torch.npu.ExternalEvent()
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            self.launch()
            self.group = torch.npu.graph_task_group_end(stream)
            self.result = self.out * 1

    def launch(self, **changes):
        torch_npu.npu_fused_infer_attention_score.out(
            **(self.arguments | changes), workspace=self.workspace, out=[self.out, self.lse]
        )

    def update(self, rows, lengths, **changes):
        with torch.npu.stream(self.stream):
            torch.npu.graph_task_update_begin(self.stream, self.group)
            try:
                ends = torch.tensor(rows).cumsum(0).tolist()
                self.launch(actual_seq_lengths=ends, actual_seq_lengths_kv=lengths, **changes)
            finally:
                torch.npu.graph_task_update_end(self.stream)
            self.event.record(self.stream)

    def check(self, rows, lengths, **changes):
        self.out.fill_(float("nan"))
        self.update(rows, lengths, **changes)
        self.graph.replay()
        torch.npu.synchronize()
        assert_causal(self.result, self.query, self.pages, rows, lengths)


def test_query_lengths_of_a_captured_task_change():
    captured = CapturedAttention([3, 3, 3, 3], [3, 3, 3, 3])
    captured.check([3, 3, 3, 3], [3, 3, 3, 3])
    captured.check([9, 1, 1, 1], [150, 70, 1, 200])
    captured.check([12, 0, 0, 0], [12, 0, 0, 0])
    captured.check([1, 0, 4, 7], [33, 50, 4, 9])


def test_an_update_may_have_fewer_entries_only_with_fewer_rows_of_the_table():
    captured = CapturedAttention([3, 3, 3, 3], [3, 3, 3, 3])
    narrow = captured.arguments["block_table"][:3]
    captured.check([5, 5, 2], [9, 5, 30], block_table=narrow)

    with pytest.raises(RuntimeError) as refusal:
        captured.update([4, 4, 4], [4, 4, 4])
    # A second error follows at the end of the update. The context of this second error is the
    # refusal.
    assert "block_table has 4 rows for 3 sequences" in str(refusal.value.__context__)


@pytest.mark.parametrize("rows", [1, 20])  # both algorithms of the kernel
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_values_after_the_last_key_of_a_block_are_read(rows, junk):
    query, pages = make([rows, 1], [40, 32])  # the second sequence fills its last block
    last = pages.table[0, 40 // 16].item()
    pages.values[last, 40 % 16 + 2, 0, 5] = junk
    pages.keys[last, 40 % 16 :] = junk  # the kernel overwrites these keys' scores

    options = {"sparse_mode": 3, "atten_mask": CAUSAL.npu()}
    out, _ = paged_attention(query, pages, [rows, 1], HEADS, KV_HEADS, **options)

    spoilt = out.cpu().isnan()
    assert spoilt[:rows, : HEADS // KV_HEADS, 5].all()
    assert spoilt.sum() == rows * HEADS // KV_HEADS
