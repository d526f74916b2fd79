"""Attention over disjoint subsets (shares) of the keys: log-sum-exps, shares without keys, and the
merging of results.
"""

import math

import pytest
import torch
import torch_npu

from tests.emulator.compare import assert_close, refused_by
from tests.emulator.paged import (
    Pages,
    paged_arguments,
    paged_attention,
    reference,
)

# The log-sum-exp of a row without keys. This value is finite, so that the merged result of a row
# without keys in all shares is zero, and not NaN.
FAR_BELOW = -3.4e38
NAME = "aclnnAttentionUpdate"


def shares(count, rows, dim, dtype=torch.float32):
    return (
        [torch.randn(rows) * 5 for _ in range(count)],
        [torch.randn(rows, dim).to(dtype) for _ in range(count)],
    )


def merge(lse, outs, update_type=0):
    on_device = [[t.npu() for t in part] for part in (lse, outs)]
    return torch_npu.npu_attention_update(*on_device, update_type)


def merged(lse, outs):
    """Merge ``outs`` by the formula in the operator's document, in float32."""
    lse, outs = torch.stack(lse), torch.stack([out.float() for out in outs])
    total = lse.logsumexp(0)
    return ((lse - total).exp()[..., None] * outs).sum(0), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count,rows,dim", [(1, 4, 8), (2, 12, 128), (3, 7, 64), (16, 5, 512)])
def test_shares_are_merged_by_their_log_sum_exps(dtype, count, rows, dim):
    lse, outs = shares(count, rows, dim, dtype)

    out, total = merge(lse, outs, 1)

    want, want_total = merged(lse, outs)
    assert out.dtype == dtype and total.dtype == torch.float32
    assert_close(out, want)
    assert torch.allclose(total.cpu(), want_total, atol=1e-5)
    assert torch.equal(merge(lse, outs, 0)[0].cpu(), out.cpu())


@pytest.mark.parametrize("empty", [-math.inf, math.inf, FAR_BELOW])
def test_an_empty_share_counts_for_nothing(empty):
    lse, outs = shares(3, 6, 64)
    lse[1][2], outs[1][2] = empty, 0

    out, total = merge(lse, outs, 1)

    lse[1][2] = -math.inf
    want, want_total = merged(lse, outs)
    assert_close(out, want)
    assert torch.allclose(total.cpu(), want_total, atol=1e-5)


def test_a_row_that_is_empty_in_all_shares_is_zero_only_if_its_log_sum_exps_are_finite():
    for empty in (-math.inf, math.inf, FAR_BELOW):
        lse, outs = shares(2, 2, 64)
        for i in range(2):
            lse[i][0], outs[i][0] = empty, 0
        out = merge(lse, outs)[0].cpu()
        assert out[0].count_nonzero() == 0 if empty == FAR_BELOW else out[0].isnan().all()
        assert out[1].isfinite().all()


def test_nan_in_an_empty_share_makes_the_result_nan():
    lse, outs = shares(2, 1, 64)
    lse[1][0], outs[1][0] = -math.inf, math.nan
    assert merge(lse, outs)[0].cpu().isnan().all()


def test_no_rows_are_merged_to_none():
    out, _ = merge(*shares(2, 0, 64))
    assert out.shape == (0, 64)


def test_merging_refuses():
    lse, outs = shares(2, 4, 64)
    refused_by(NAME, "must be 0 or 1", lambda: merge(lse, outs, 2))
    refused_by(NAME, "1 tensors of lse for 2", lambda: merge(lse[:1], outs))
    refused_by(NAME, "17 shares, at most 16", lambda: merge(*shares(17, 4, 64)))
    refused_by(NAME, "lse must be float32", lambda: merge([t.half() for t in lse], outs))
    refused_by(NAME, "local_out must be Float", lambda: merge(lse, [outs[0], outs[1].half()]))
    refused_by(
        NAME, "local_out must be float32, float16", lambda: merge(lse, [o.int() for o in outs])
    )
    refused_by(NAME, "lse must have rank 1", lambda: merge([t.view(2, 2) for t in lse], outs))
    refused_by(
        NAME, "local_out must have rank 2", lambda: merge(lse, [o.view(2, 2, 64) for o in outs])
    )
    refused_by(NAME, "must have one shape", lambda: merge(lse, [outs[0], outs[1][:2]]))
    refused_by(
        NAME, "lse of shape [4] for local_out [2, 64]", lambda: merge(lse, [o[:2] for o in outs])
    )
    refused_by(NAME, "D of local_out is 60", lambda: merge(*shares(2, 4, 60)))
    refused_by(NAME, "D of local_out is 520", lambda: merge(*shares(2, 4, 520)))
    wide = torch.zeros(4, 128).npu()[:, :64]
    refused_by(NAME, "must be contiguous",
            lambda: torch_npu.npu_attention_update([lse[0].npu()], [wide], 0))  # fmt: skip


@pytest.mark.slow
def test_8_5_does_not_know_infinity(run_script):
    status, output = run_script(
        """
        lse = [torch.tensor([0.0, 0.0]).npu(), torch.tensor([float("inf"), float("-inf")]).npu()]
        outs = [torch.ones(2, 8).npu(), torch.zeros(2, 8).npu()]
        print("RESULT", torch_npu.npu_attention_update(lse, outs, 0)[0][:, 0].cpu().tolist())
        """,
        cann="8.5.0",
    )
    assert status == 0 and "RESULT [nan, 1.0]" in output, output


# ---- attention for rows without keys


def test_rows_without_keys_are_zero_with_an_infinite_log_sum_exp():
    pages = Pages([0, 20], 2, 64, 16, torch.bfloat16)
    query = torch.randn(2, 4, 64).bfloat16()
    out, lse = paged_attention(query, pages, [1, 1], 4, 2, lse=True)
    assert out[0].cpu().count_nonzero() == 0
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 1)
    assert (lse[0].cpu() == math.inf).all() and lse[1].cpu().isfinite().all()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_single_rows_without_keys_have_a_finite_log_sum_exp(layout):
    heads, dim = 4, 64
    pages = Pages([0, 20], 2, dim, 16, torch.bfloat16)
    query = torch.randn(2, heads, dim).bfloat16()
    shape = {"BNSD": (2, heads, 1, dim), "BSND": (2, 1, heads, dim), "BSH": (2, 1, heads * dim)}
    out, lse = paged_attention(
        query.view(shape[layout]), pages, [1, 1], heads, 2, lse=True, input_layout=layout,
        actual_seq_lengths=None,
    )  # fmt: skip
    assert out[0].cpu().count_nonzero() == 0
    assert lse.shape == (2, heads, 1, 1)
    assert torch.equal(lse[0].cpu(), torch.full((heads, 1, 1), -3.4e38))


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_over_shares_of_the_cache_equals_decode_over_all(rows):
    """The cache is split into two shares. The second share has no token of the first sequence."""
    heads, kv_heads, dim, lengths = 4, 2, 64, [3, 41]
    pages = Pages(lengths, kv_heads, dim, 16, torch.bfloat16)
    query = torch.randn(2 * rows, heads, dim).bfloat16()
    found = []
    # For each sequence, the number of its tokens in the first share. These are the sequence's first
    # tokens. All later tokens are in the second share.
    for held in ([3, 25], [0, 16]):
        share = Pages(held, kv_heads, dim, 16, torch.bfloat16)
        for b, n in enumerate(held):
            first = 0 if len(found) == 0 else lengths[b] - n
            at = share.table[b].long()
            for cache, source in ((share.keys, pages.keys), (share.values, pages.values)):
                flat = cache[at].flatten(0, 1)
                flat[:n] = pages.tokens(source, b)[first : first + n]
                cache[at] = flat.view(len(at), 16, kv_heads, dim)
        found.append(paged_attention(query, share, [rows] * 2, heads, kv_heads, lse=True))

    lse = [lse.masked_fill(lse == math.inf, FAR_BELOW).view(-1) for _, lse in found]
    out, _ = torch_npu.npu_attention_update(lse, [o.view(-1, dim) for o, _ in found], 0)

    for b in range(2):
        part = slice(b * rows, (b + 1) * rows)
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        want, _ = reference(query[part], keys, values, heads, kv_heads)
        assert_close(out.view(query.shape)[part], want)


@pytest.mark.parametrize("first,second", [([40, 40], [1030, 1]), ([1500, 900], [1, 0])])
def test_updates_cross_the_lengths_at_which_tilings_change(first, second):
    """An update of a task must not change the type of the task's kernel. All attention kernels have
    the same type.

    So an update may change the lengths of a task to any values.
    """
    pages = Pages([1500, 1500], 2, 64, 128, torch.bfloat16)
    arguments = paged_arguments(torch.randn(2, 4, 64).bfloat16(), pages, [1, 1], 4, 2)

    def attention(lengths):
        return torch_npu.npu_fused_infer_attention_score(
            **(arguments | {"actual_seq_lengths_kv": lengths})
        )[0]

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = attention(first) * 1
    for lengths in (first, second, first):
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        torch.npu.synchronize()
        assert torch.equal(out.cpu(), attention(lengths).cpu())


def test_log_sum_exps_of_captured_attention_follow_its_updates():
    """Some updates leave a sequence without keys. Later updates give this sequence keys again."""
    pages = Pages([200, 200, 200], 2, 64, 128, torch.bfloat16)
    pages.lengths = [5, 5, 5]
    arguments = paged_arguments(torch.randn(3, 4, 64).bfloat16(), pages, [1] * 3, 4, 2, lse=True)
    sizing = torch_npu._npu_fused_infer_attention_score_get_max_workspace
    workspace = sizing(**arguments)
    out, lse = torch_npu.npu_fused_infer_attention_score(**arguments)
    updates, event = torch.npu.Stream(), torch.npu.ExternalEvent()
    torch.npu.synchronize()

    def launch(lengths):
        torch_npu.npu_fused_infer_attention_score.out(
            **(arguments | {"actual_seq_lengths_kv": lengths}), workspace=workspace, out=[out, lse]
        )

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        launch([5, 5, 5])
        group = torch.npu.graph_task_group_end(stream)
        copies = [out * 1, lse * 1]

    for lengths in ([0, 7, 130], [1, 0, 129], [0, 0, 0], [128, 1, 200]):
        graph.replay()
        with torch.npu.stream(updates):
            torch.npu.graph_task_update_begin(updates, group)
            launch(lengths)
            torch.npu.graph_task_update_end(updates)
            event.record(updates)
        torch.npu.synchronize()
        want = torch_npu.npu_fused_infer_attention_score(
            **(arguments | {"actual_seq_lengths_kv": lengths})
        )
        for got, wanted in zip(copies, want, strict=True):
            assert torch.equal(got.cpu(), wanted.cpu())
        empty = torch.tensor(lengths) == 0
        assert torch.equal(copies[1].cpu().isinf().all(1).view(-1), empty)
        assert copies[0].cpu()[empty].count_nonzero() == 0
