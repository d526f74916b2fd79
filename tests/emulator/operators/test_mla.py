"""Multi-head latent attention: rotary embedding, cache writes, attention and batched products."""

import math

import pytest
import torch
import torch_npu

from tests.emulator.compare import assert_close, refused_by
from tests.emulator.paged import CAUSAL

HALVES = [torch.bfloat16, torch.float16]
LATENT, ROPE = 512, 64


def on_device(options):
    return {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


# ---- rotary embedding and cache writes


def rotate_pairs(x, cos, sin):
    x, cos, sin = x.float(), cos.float(), sin.float()
    apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    half = x.shape[-1] // 2
    return apart * cos + torch.cat([-apart[..., half:], apart[..., :half]], -1) * sin


def angles(*shape, dtype):
    a = torch.randn(*shape)
    return a.cos().to(dtype), a.sin().to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("positions,shared", [(5, False), (5, True), (1, True)])
def test_interleave_rope(dtype, positions, shared):
    x = torch.randn(3, 4, positions, ROPE).to(dtype)
    cos, sin = angles(3, 1, 1 if shared else positions, ROPE, dtype=dtype)
    out = torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu())
    assert_close(out, rotate_pairs(x, cos, sin))


def test_interleave_rope_refuses():
    def rope(x, angle):
        return lambda: torch_npu.npu_interleave_rope(x.npu(), angle.npu(), angle.npu())

    def zeros(*shape):
        return torch.zeros(*shape).half()

    name = "aclnnInterleaveRope"
    refused_by(
        name, "x must be float16 or bfloat16", rope(torch.zeros(2, 4, 1, 64), zeros(2, 1, 1, 64))
    )
    refused_by(name, "D must be 64", rope(zeros(2, 4, 1, 32), zeros(2, 1, 1, 32)))
    refused_by(name, "cos must have one head", rope(zeros(2, 4, 1, 64), zeros(2, 4, 1, 64)))
    refused_by(name, "for x", rope(zeros(2, 4, 3, 64), zeros(2, 1, 2, 64)))
    refused_by(name, "cos must be Half", rope(zeros(2, 4, 1, 64), torch.zeros(2, 1, 1, 64)))


def kv_rows(batch, length, dtype):
    kv = torch.randn(batch, 1, length, LATENT + ROPE).to(dtype)
    gamma = torch.rand(LATENT).to(dtype)
    cos, sin = angles(batch, 1, length, ROPE, dtype=dtype)
    f = kv[..., :LATENT].float()
    latent = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5) * gamma.float()
    return (kv, gamma, cos, sin), latent, rotate_pairs(kv[..., LATENT:], cos, sin)


def zero_caches(*shape, dtype):
    return [torch.zeros(*shape, n, dtype=dtype).npu() for n in (ROPE, LATENT)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ["PA", "PA_BNSD"])
@pytest.mark.parametrize("batch,length", [(6, 1), (2, 3)])
@pytest.mark.parametrize("copies", [True, False])
def test_paged_cache_of_normed_and_rotated_rows(dtype, mode, batch, length, copies):
    inputs, latent, rope = kv_rows(batch, length, dtype)
    caches = zero_caches(6, 16, 1, dtype=dtype)
    slots = torch.tensor([17, 3, -1, 95, 40, -1])

    out = torch_npu.npu_kv_rmsnorm_rope_cache(
        *on_device(dict(enumerate(inputs))).values(),
        slots.npu(),
        *caches,
        cache_mode=mode,
        is_output_kv=copies,
    )

    live = slots >= 0
    for cache, rows in zip(caches, (rope, latent), strict=True):
        flat, rows = cache.cpu().view(96, -1), rows.reshape(6, -1)
        assert_close(flat[slots[live]], rows[live])
        assert flat.any(-1).sum() == live.sum()
    assert out[0].data_ptr() == caches[0].data_ptr() and out[1].data_ptr() == caches[1].data_ptr()
    if copies:
        assert_close(out[2], rope)
        assert_close(out[3], latent)


def test_cache_of_one_stretch_for_each_sequence():
    inputs, latent, rope = kv_rows(2, 3, torch.float16)
    caches = zero_caches(2, 1, 8, dtype=torch.float16)
    slots = torch.tensor([[0, 7, 2], [5, -1, 1]])
    torch_npu.npu_kv_rmsnorm_rope_cache(
        *on_device(dict(enumerate(inputs))).values(), slots.npu(), *caches, cache_mode="Norm"
    )
    for cache, rows in zip(caches, (rope, latent), strict=True):
        for b in range(2):
            live = slots[b] >= 0
            assert_close(cache[b, 0].cpu()[slots[b][live]], rows[b, 0][live])
            assert cache[b, 0].cpu().any(-1).sum() == live.sum()


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("kv must be float16 or bfloat16", {"kv": torch.zeros(2, 1, 1, 576)}),
        ("kv must be 512 + 64 wide, got 256 + 320", {"gamma": torch.zeros(256).half()}),
        ("cos must be [2, 1, 1, 64]", {"cos": torch.zeros(1, 1, 1, 64).half()}),
        ("index must be int64", {"index": torch.zeros(2, dtype=torch.int32)}),
        ("index must be int64 [B * S]", {"index": torch.zeros(3, dtype=torch.int64)}),
        ("is not emulated, only Norm", {"cache_mode": "PA_NZ"}),
        ("the cache has 1 blocks", {"k_cache": torch.zeros(1, 16, 1, 64).half(),
                                    "ckv_cache": torch.zeros(1, 16, 1, 512).half()}),
        ("do not fit cache_mode PA", {"k_cache": torch.zeros(4, 1, 16, 64).half()}),
        ("ckv_cache must be Half", {"ckv_cache": torch.zeros(4, 16, 1, 512)}),
        ("quantisation", {"k_rope_scale": torch.zeros(64)}),
    ],
)  # fmt: skip
def test_cache_writes_refuse(rule, changes):
    call = {
        "kv": torch.zeros(2, 1, 1, 576).half(),
        "gamma": torch.zeros(512).half(),
        "cos": torch.zeros(2, 1, 1, 64).half(),
        "sin": torch.zeros(2, 1, 1, 64).half(),
        "index": torch.zeros(2, dtype=torch.int64),
        "k_cache": torch.zeros(4, 16, 1, 64).half(),
        "ckv_cache": torch.zeros(4, 16, 1, 512).half(),
        "cache_mode": "PA",
    } | changes
    call = on_device(call)
    refused_by("aclnnKvRmsNormRopeCache", rule, lambda: torch_npu.npu_kv_rmsnorm_rope_cache(**call))


# ---- attention


class LatentPages:
    """A paged cache with one latent and one rotated key row for each token."""

    def __init__(self, lengths, block_size, dtype):
        columns = max(-(-n // block_size) for n in lengths) + 1
        count = len(lengths) * columns + 2
        self.latent = torch.randn(count, block_size, LATENT).to(dtype)
        self.rope = torch.randn(count, block_size, ROPE).to(dtype)
        order = torch.randperm(count)[: len(lengths) * columns]
        self.table = order.view(len(lengths), columns).to(torch.int32)
        self.on_device = [t.npu() for t in (self.latent, self.rope, self.table)]

    def tokens(self, sequence, length):
        pages = self.table[sequence].long()
        return [cache[pages].flatten(0, 1)[:length].float() for cache in (self.latent, self.rope)]


SCALE = 192**-0.5


def latent_scores(query, rope, latent, key_rope, causal):
    """Return the attention scores [heads, rows, tokens] of one sequence."""
    scores = torch.einsum("qhd,kd->hqk", query.float(), latent)
    scores = (scores + torch.einsum("qhd,kd->hqk", rope.float(), key_rope)) * SCALE
    rows, length = scores.shape[1:]
    hidden = torch.ones(rows, length).triu(length - rows + 1).bool()
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def reference(query, rope, latent, key_rope, causal):
    """Return the results [rows, heads, 512] of attention over the tokens of one sequence."""
    scores = latent_scores(query, rope, latent, key_rope, causal)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), latent)


def arrange(t, layout):
    """Return the query [batch, rows, heads, D] in the given layout."""
    if layout == "TND":
        return t.flatten(0, 1).contiguous()
    if layout == "BNSD":
        return t.transpose(1, 2).contiguous()
    return t.flatten(2).contiguous() if layout == "BSH" else t.contiguous()


def unarrange(out, layout, batch, rows):
    """Rearrange a result of the given layout to [batch, rows, heads, D]."""
    source, _, target = layout.partition("_")
    shape = target or source
    if shape == "NBSD":
        return out.permute(1, 2, 0, 3)
    if shape == "NTD":
        return out.transpose(0, 1).unflatten(0, (batch, rows))
    if shape == "TND":
        return out.unflatten(0, (batch, rows))
    if shape == "BNSD":
        return out.transpose(1, 2)
    return out.unflatten(2, (-1, LATENT)) if shape == "BSH" else out


def latent_arguments(query, rope, pages, layout, lengths, **options):
    batch, rows, heads, _ = query.shape
    block_size = pages.latent.shape[1]
    latent, key_rope, table = pages.on_device
    source = layout.partition("_")[0]
    if source == "BNSD":  # the pages have the shape [blocks, heads, block size, D]
        latent, key_rope = latent[:, None], key_rope[:, None]
    arguments = {
        "query": arrange(query, source).npu(),
        "key": latent,
        "value": latent,
        "query_rope": arrange(rope, source).npu(),
        "key_rope": key_rope,
        "actual_seq_kvlen": lengths,
        "block_table": table,
        "num_query_heads": heads,
        "num_key_value_heads": 1,
        "softmax_scale": SCALE,
        "input_layout": layout,
        "block_size": block_size,
    }
    if source == "TND":
        arguments["actual_seq_qlen"] = [rows * (b + 1) for b in range(batch)]
    if rows > 1:
        arguments |= {"sparse_mode": 3, "atten_mask": CAUSAL.npu()}
    return arguments | options


def make(batch, rows, heads, lengths, dtype, block_size=16):
    query = torch.randn(batch, rows, heads, LATENT).to(dtype)
    rope = torch.randn(batch, rows, heads, ROPE).to(dtype)
    return query, rope, LatentPages(lengths, block_size, dtype)


LAYOUTS = ["BNSD", "BSND", "BSH", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows,heads", [(1, 4), (1, 128), (3, 16), (16, 2)])
def test_latent_attention(dtype, layout, rows, heads):
    lengths = [16, 70, 33]
    query, rope, pages = make(3, rows, heads, lengths, dtype)
    arguments = latent_arguments(query, rope, pages, layout, lengths)

    out, _ = torch_npu.npu_fused_infer_attention_score_v2(**arguments)

    got = unarrange(out.cpu(), layout, 3, rows)
    assert got.shape == query.shape
    for b, length in enumerate(lengths):
        want = reference(query[b], rope[b], *pages.tokens(b, length), causal=rows > 1)
        assert_close(got[b], want)


@pytest.mark.parametrize(
    "layout,rows",
    [("TND", 3), ("TND_NTD", 2), ("BNSD", 1), ("BNSD", 3), ("BSND", 1), ("BNSD_NBSD", 1)],
)
def test_log_sum_exp_of_latent_attention(layout, rows):
    lengths = [20, 50]
    query, rope, pages = make(2, rows, 8, lengths, torch.bfloat16)
    arguments = latent_arguments(query, rope, pages, layout, lengths, return_softmax_lse=True)

    _, lse = torch_npu.npu_fused_infer_attention_score_v2(**arguments)

    got = lse.cpu()[..., 0]
    got = got.unflatten(0, (2, rows)) if layout.startswith("TND") else got.transpose(1, 2)
    for b, length in enumerate(lengths):
        scores = latent_scores(query[b], rope[b], *pages.tokens(b, length), causal=rows > 1)
        assert torch.allclose(got[b], scores.logsumexp(-1).t(), atol=1e-4)


def test_the_first_interface_takes_latent_attention_too():
    query, rope, pages = make(2, 1, 8, [5, 40], torch.bfloat16)
    arguments = latent_arguments(query, rope, pages, "BNSD_NBSD", [5, 40])
    second, _ = torch_npu.npu_fused_infer_attention_score_v2(**arguments)
    names = {
        "actual_seq_kvlen": "actual_seq_lengths_kv",
        "num_query_heads": "num_heads",
        "softmax_scale": "scale",
    }
    arguments = {names.get(k, k): v for k, v in arguments.items()}
    first, _ = torch_npu.npu_fused_infer_attention_score(**arguments)
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("layout,rows", [("BNSD_NBSD", 1), ("TND_NTD", 2), ("BSND", 1)])
def test_lengths_of_captured_latent_attention_change(layout, rows):
    query, rope, pages = make(3, rows, 8, [90, 90, 90], torch.bfloat16)
    arguments = latent_arguments(query, rope, pages, layout, [2, 2, 2])
    sizing = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace
    workspace = sizing(**arguments)
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(**arguments)
    update_stream, event = torch.npu.Stream(), torch.npu.ExternalEvent()
    torch.npu.synchronize()

    def launch(lengths):
        torch_npu.npu_fused_infer_attention_score_v2.out(
            **(arguments | {"actual_seq_kvlen": lengths}), workspace=workspace, out=[out, lse]
        )

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        launch([2, 2, 2])
        group = torch.npu.graph_task_group_end(stream)
        result = out * 1

    for lengths in ([2, 2, 2], [90, 17, 5], [3, 64, 0]):
        out.fill_(float("nan"))
        with torch.npu.stream(update_stream):
            torch.npu.graph_task_update_begin(update_stream, group)
            launch(lengths)
            torch.npu.graph_task_update_end(update_stream)
            event.record(update_stream)
        graph.replay()
        got = unarrange(result.cpu(), layout, 3, rows)
        for b, length in enumerate(lengths):
            if length == 0:  # a padded request
                assert got[b].count_nonzero() == 0
                continue
            want = reference(query[b], rope[b], *pages.tokens(b, length), causal=rows > 1)
            assert_close(got[b], want)


def test_attention_with_rope_before_absorption():
    """As in a prefill, keys are not paged. A head has 128 elements without rotation, and 64 with
    rotation.
    """
    rows, heads = [5, 12], 4
    total = sum(rows)
    query, key, value = (torch.randn(total, heads, 128).bfloat16() for _ in range(3))
    query_rope, key_rope = (torch.randn(total, heads, ROPE).bfloat16() for _ in range(2))
    ends = torch.tensor(rows).cumsum(0).tolist()

    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        **on_device(
            {
                "query": query,
                "key": key,
                "value": value,
                "query_rope": query_rope,
                "key_rope": key_rope,
                "atten_mask": CAUSAL,
            }
        ),
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        num_query_heads=heads,
        num_key_value_heads=heads,
        softmax_scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
    )

    start = 0
    for n in rows:
        part = slice(start, start + n)
        q, k = (
            torch.cat(pair, -1)[part].float() for pair in ((query, query_rope), (key, key_rope))
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        assert_close(
            out[part], torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[part].float())
        )
        start += n


@pytest.mark.parametrize(
    "rule,rows,heads,layout,changes",
    [
        ("num_heads must be 1, 2, 4", 1, 6, "BNSD", {}),
        ("a sequence may have 16 query rows, one has 17", 17, 4, "BSND", {}),
        ("a sequence may have 16 query rows, one has 17", 17, 4, "TND", {}),
        ("sparse_mode must be 0, 3 or 4", 2, 4, "BSND", {"sparse_mode": 2}),
        ("query_rope must have D 64", 1, 4, "BSND", {"query_rope": torch.zeros(2, 1, 4, 32).half(),
                                                     "key_rope": torch.zeros(8, 16, 32).half()}),
        ("query_rope of shape", 1, 4, "BSND", {"query_rope": torch.zeros(2, 1, 2, 64).half()}),
        ("key_rope of shape", 1, 4, "BSND", {"key_rope": torch.zeros(4, 8, 64).half()}),
        ("key_rope must be Half", 1, 4, "BSND", {"key_rope": torch.zeros(8, 16, 64)}),
        ("go together", 1, 4, "BSND", {"key_rope": None}),
        ("is excluded", 1, 4, "BNSD_BSND", {}),
        ("needs query_rope and head size 512", 1, 4, "BNSD_NBSD", {"query_rope": None,
                                                                    "key_rope": None}),
        ("num_key_value_heads must be 1", 1, 4, "BSND",
         {"num_key_value_heads": 2, "key": torch.zeros(8, 16, 1024).half(),
          "value": torch.zeros(8, 16, 1024).half(), "key_rope": torch.zeros(8, 16, 128).half()}),
    ],
)  # fmt: skip
def test_latent_attention_refuses(rule, rows, heads, layout, changes):
    query, rope, pages = make(2, rows, heads, [20, 20], torch.float16)
    arguments = latent_arguments(query, rope, pages, layout, [20, 20], **changes)
    refused_by(
        "aclnnFusedInferAttentionScoreV4",
        rule,
        lambda: torch_npu.npu_fused_infer_attention_score_v2(**on_device(arguments)),
    )


def test_without_strictness_float32_and_other_sizes_are_taken(run_script):
    status, output = run_script(
        """
        latent, rope, heads, tokens = 32, 8, 3, 5
        caches = [torch.zeros(2, 4, 1, n).npu() for n in (rope, latent)]
        angle = torch.rand(1, 1, tokens, rope).npu()
        kv = torch.randn(1, 1, tokens, latent + rope).npu()
        torch_npu.npu_kv_rmsnorm_rope_cache(
            kv, torch.ones(latent).npu(), angle, angle, torch.arange(tokens).npu(), *caches,
            cache_mode="PA",
        )
        torch_npu.npu_interleave_rope(kv[..., latent:].contiguous(), angle, angle)
        q, r = torch.randn(1, heads, 1, latent), torch.randn(1, heads, 1, rope)
        flat = [c.view(2, 4, -1) for c in caches]
        out, _ = torch_npu.npu_fused_infer_attention_score_v2(
            q.npu(), flat[1], flat[1], query_rope=r.npu(), key_rope=flat[0],
            actual_seq_kvlen=[tokens], block_table=torch.arange(2).int().npu()[None],
            num_query_heads=heads, num_key_value_heads=1, softmax_scale=0.3,
            input_layout="BNSD_NBSD", block_size=4,
        )
        rows = [c.cpu().view(8, -1)[:tokens] for c in flat]
        scores = (q[0, :, 0] @ rows[1].t() + r[0, :, 0] @ rows[0].t()) * 0.3
        assert torch.allclose(out.cpu()[:, 0, 0], scores.softmax(-1) @ rows[1], atol=1e-5)
        """,
        strict=False,
    )
    assert status == 0, output


# ---- batched matrix products, which absorbed attention needs


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_batched_products(dtype):
    a, b = torch.randn(4, 7, 32).to(dtype), torch.randn(4, 32, 24).to(dtype) / 6
    want = a.float() @ b.float()
    assert_close(torch.bmm(a.npu(), b.npu()), want)
    assert_close(a.npu() @ b.npu(), want)
    turned = a.transpose(0, 1).contiguous().npu().transpose(0, 1)
    assert_close(torch.bmm(turned, b.npu()), want)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_transposed_batched_products(dtype, turned, parts):
    a, b = torch.randn(4, 7, 32).to(dtype), torch.randn(4, 32, 16).to(dtype) / 6
    out = torch_npu.npu_transpose_batchmatmul(
        (a.transpose(0, 1).contiguous() if turned else a).npu(),
        b.npu(),
        perm_x1=[1, 0, 2] if turned else [0, 1, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
        batch_split_factor=parts,
    )
    want = (a.float() @ b.float()).transpose(0, 1)
    if parts > 1:
        want = want.reshape(7, parts, -1).transpose(0, 1)
    assert_close(out, want)


def test_transposed_batched_products_refuse():
    a, b = torch.zeros(4, 7, 32).half().npu(), torch.zeros(4, 32, 16).half().npu()
    call, name = torch_npu.npu_transpose_batchmatmul, "aclnnTransposeBatchMatMul"
    refused_by(name, "multiples of 16", lambda: call(a[:, :, :24], b[:, :24]))
    refused_by(name, "perm_x2", lambda: call(a, b, perm_x2=[0, 2, 1]))
    refused_by(name, "do not multiply", lambda: call(a, b[:3]))
    refused_by(name, "weight must be Half", lambda: call(a, b.float()))
