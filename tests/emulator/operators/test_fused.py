"""Fused norms, rotary, SwiGLU, cache writes and attention are compared with plain float32 torch."""

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.emulator.compare import FLOATS, assert_close, refused
from tests.emulator.paged import CAUSAL, Pages, paged_attention, reference


def rms_norm(x, gamma, epsilon=1e-6):
    f = x.float()
    return f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + epsilon) * gamma.float()


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype):
    x, gamma = torch.randn(5, 3, 64).to(dtype), torch.rand(64).to(dtype)

    out, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)

    assert_close(out, rms_norm(x, gamma))
    want = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(rstd.cpu(), want, rtol=1e-4)


def test_rms_norm_of_a_strided_input():
    x, gamma = torch.randn(5, 128), torch.rand(64)
    out = torch_npu.npu_rms_norm(x.npu()[:, ::2], gamma.npu(), 1e-6)[0]
    assert_close(out, rms_norm(x[:, ::2], gamma))


def test_norms_with_a_strided_weight():
    x, weights = torch.randn(5, 64), torch.rand(64, 2)
    gamma = weights.npu()[:, 0]

    out = torch_npu.npu_rms_norm(x.npu(), gamma, 1e-6)[0]
    added = torch_npu.npu_add_rms_norm(x.npu(), x.npu(), gamma, 1e-6)[0]

    assert_close(out, rms_norm(x, weights[:, 0]))
    assert_close(added, rms_norm(2 * x, weights[:, 0]))


def test_rms_norm_of_no_rows():
    gamma = torch.rand(64).npu()

    out, rstd = torch_npu.npu_rms_norm(torch.zeros(0, 64).npu(), gamma, 1e-6)

    assert out.shape == (0, 64) and rstd.shape == (0, 1)
    refused("x must not be empty", lambda: torch_npu.npu_add_rms_norm(out, out, gamma, 1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(dtype):
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    gamma = torch.rand(64).to(dtype)

    out, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-6)

    assert_close(total, x.float() + residual.float())
    assert_close(out, rms_norm(total.cpu(), gamma))


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu(dtype):
    x = torch.randn(5, 96).to(dtype)
    gate, up = x.float().chunk(2, -1)
    assert_close(torch_npu.npu_swiglu(x.npu()), functional.silu(gate) * up)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_clipped_swiglu(dtype, interleaved):
    x = (3 * torch.randn(5, 96)).to(dtype)
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.float().clamp(max=2.0), up.float().clamp(-2.0, 2.0)

    out = torch_npu.npu_clipped_swiglu(
        x.npu(), alpha=1.5, limit=2.0, bias=1.0, interleaved=interleaved
    )

    assert_close(out, gate * torch.sigmoid(1.5 * gate) * (up + 1))


def rotate(x, cos, sin, interleaved):
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * cos + turned * sin


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(dtype, mode):
    x, angles = torch.randn(1, 7, 4, 64).to(dtype), torch.randn(1, 7, 1, 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    out = torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), mode)
    assert_close(out, rotate(x.float(), cos.float(), sin.float(), mode == "interleave"))


def rotated_by_cache(x, rows, head, mode):
    """Rotate the first elements of each head of ``x``. In each row of ``rows``, the first half
    contains cosines, and the second half contains sines.
    """
    cos, sin = rows.unsqueeze(1).chunk(2, -1)
    heads = x.float().view(x.shape[0], -1, head).clone()
    turned = heads[..., : rows.shape[-1]]
    a, b = turned.chunk(2, -1) if mode == "half" else (turned[..., ::2], turned[..., 1::2])
    first, second = a * cos - b * sin, b * cos + a * sin
    a.copy_(first)
    b.copy_(second)
    return heads.view(x.shape)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("dtype", "head", "turned"), [
    (torch.bfloat16, 64, 64), (torch.float16, 128, 64), (torch.float32, 48, 16),
])  # fmt: skip
def test_rotary_embedding_by_positions(dtype, head, turned, mode):
    query, key = torch.randn(5, 3 * head).to(dtype), torch.randn(5, head).to(dtype)
    cache, positions = torch.randn(20, turned).to(dtype), torch.tensor([7, 0, 19, 3, 3])

    got = torch_npu.npu_mrope(
        positions.npu(), query.npu(), key.npu(), cache.npu(), head,
        mrope_section=[0, 0, 0], rotary_mode=mode,
    )  # fmt: skip

    for x, out in zip((query, key), got, strict=True):
        assert_close(out, rotated_by_cache(x, cache[positions].float(), head, mode))


def test_sections_of_a_rotary_embedding_have_their_own_positions():
    query, key = torch.randn(4, 256).bfloat16(), torch.randn(4, 128).bfloat16()
    cache, positions = torch.randn(30, 128).bfloat16(), torch.randint(0, 30, (3, 4))
    sections = [16, 24, 24]
    parts = [cache[row].float().view(4, 2, 64).split(sections, -1) for row in positions]
    rows = torch.cat([part[i] for i, part in enumerate(parts)], -1).reshape(4, 128)

    got = torch_npu.npu_mrope(
        positions.npu(), query.npu(), key.npu(), cache.npu(), 128, mrope_section=sections,
        rotary_mode="half",
    )  # fmt: skip

    for x, out in zip((query, key), got, strict=True):
        assert_close(out, rotated_by_cache(x, rows, 128, "half"))


@pytest.mark.parametrize(("change", "reason"), [
    ({"cache": torch.zeros(20, 48).bfloat16()}, "multiples of 32"),
    ({"head": 32}, "rotated elements 64 of heads of 32"),
    ({"positions": torch.arange(5).int()}, "positions must be int64"),
    ({"positions": torch.arange(4)}, "positions must have 5"),
    ({"positions": torch.zeros(3, 5).long()}, "sections"),
    ({"key": torch.zeros(5, 96)}, "the key must be"),
])  # fmt: skip
def test_a_rotary_embedding_refuses_what_its_document_excludes(change, reason):
    given = {
        "positions": torch.arange(5), "query": torch.zeros(5, 192).bfloat16(),
        "key": torch.zeros(5, 96).bfloat16(), "cache": torch.zeros(20, 64).bfloat16(), "head": 96,
    } | change  # fmt: skip
    *tensors, head = given.values()

    with pytest.raises(RuntimeError, match=reason):
        torch_npu.npu_mrope(*[t.npu() for t in tensors], head, mrope_section=[0, 0, 0])


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_apply_rotary_pos_emb_writes_in_place(layout):
    lead = (7,) if layout == "TND" else (1, 7)
    query, key = torch.randn(*lead, 4, 64).half(), torch.randn(*lead, 2, 64).half()
    angles = torch.randn(*lead, 1, 64)
    cos, sin = angles.cos().half(), angles.sin().half()
    q, k = query.npu(), key.npu()

    torch_npu.npu_apply_rotary_pos_emb(q, k, cos.npu(), sin.npu(), layout=layout)

    assert_close(q, rotate(query.float(), cos.float(), sin.float(), False))
    assert_close(k, rotate(key.float(), cos.float(), sin.float(), False))


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_cache_write_skips_slot_minus_one(slot_type):
    key, value = torch.randn(4, 2, 16).half(), torch.randn(4, 2, 16).half()
    caches = [torch.zeros(3, 8, 2, 16).half().npu() for _ in range(2)]
    slots = torch.tensor([5, -1, 23, 0], dtype=slot_type)

    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), value.npu(), *caches, slots.npu(), cache_mode="Norm"
    )

    for cache, rows in zip(caches, (key, value), strict=True):
        flat = cache.cpu().view(24, 2, 16)
        assert torch.equal(flat[[5, 23, 0]], rows[[0, 2, 3]])
        assert flat.count_nonzero() == rows[[0, 2, 3]].count_nonzero()


# ---- attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads,kv_heads,dim,block_size",
    [(4, 2, 64, 16), (8, 1, 128, 128), (6, 3, 32, 32), (4, 2, 96, 48)],
)
def test_decode_over_pages(dtype, heads, kv_heads, dim, block_size):
    pages = Pages([1, 70, 129, 33], kv_heads, dim, block_size, dtype)
    query = torch.randn(4, heads, dim).to(dtype)

    out, lse = paged_attention(query, pages, [1] * 4, heads, kv_heads, lse=True)

    assert out.shape == query.shape and lse.shape == (4, heads, 1)
    for b in range(4):
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        want, want_lse = reference(query[b : b + 1], keys, values, heads, kv_heads)
        assert_close(out[b : b + 1], want)
        assert torch.allclose(lse[b : b + 1, :, 0].cpu(), want_lse, atol=1e-2)


@pytest.mark.parametrize("rows", [[5, 40, 1], [70, 3, 9]])
def test_causal_prefill_after_cached_tokens(rows):
    heads, kv_heads, dim = 4, 2, 64
    lengths = [n + extra for n, extra in zip(rows, (0, 100, 20), strict=True)]
    pages = Pages(lengths, kv_heads, dim, 16, torch.float16)
    query = torch.randn(sum(rows), heads, dim).half()

    out, _ = paged_attention(
        query, pages, rows, heads, kv_heads, sparse_mode=3, atten_mask=CAUSAL.npu()
    )

    start = 0
    for b, n in enumerate(rows):
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        part = slice(start, start + n)
        assert_close(out[part], reference(query[part], keys, values, heads, kv_heads, True)[0])
        start += n


def test_a_row_without_keys_pads_a_step(capfd):
    """To pad a step, vllm-ascend adds rows without keys. It ignores the results of these rows."""
    heads, kv_heads, dim = 4, 2, 64
    pages = Pages([33, 5, 0], kv_heads, dim, 16, torch.bfloat16)
    query = torch.randn(7, heads, dim).bfloat16()
    causal = {"sparse_mode": 3, "atten_mask": CAUSAL.npu()}

    for _ in range(2):
        out, _ = paged_attention(query, pages, [1, 5, 1], heads, kv_heads, **causal)

    for part, b in ((slice(0, 1), 0), (slice(1, 6), 1)):
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        assert_close(out[part], reference(query[part], keys, values, heads, kv_heads, True)[0])
    assert out[6].count_nonzero() == 0
    assert capfd.readouterr().err.count("one query row and no keys") == 1


@pytest.mark.parametrize("window", [1, 24, 300])
@pytest.mark.parametrize("rows", [[5, 40, 1], [1, 1, 1]])
def test_a_band_hides_keys_before_the_window(window, rows):
    heads, kv_heads, dim = 4, 2, 64
    lengths = [n + extra for n, extra in zip(rows, (0, 100, 20), strict=True)]
    pages = Pages(lengths, kv_heads, dim, 16, torch.float16)
    query = torch.randn(sum(rows), heads, dim).half()

    out, _ = paged_attention(
        query, pages, rows, heads, kv_heads, sparse_mode=4, atten_mask=CAUSAL.npu(),
        pre_tokens=window - 1, next_tokens=0,
    )  # fmt: skip

    start = 0
    for b, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        part = slice(start, start + n)
        ages = torch.arange(length - n, length)[:, None] - torch.arange(length)
        hidden = (ages < 0) | (ages >= window)
        want, _ = reference(query[part], keys, values, heads, kv_heads, mask=hidden)
        assert_close(out[part], want)
        start += n


def test_a_sequence_without_tokens_gives_zeros():
    pages = Pages([0, 20], 2, 64, 16, torch.float16)
    query = torch.randn(2, 4, 64).half()
    out, _ = paged_attention(query, pages, [1, 1], 4, 2)
    assert out[0].cpu().count_nonzero() == 0


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("rows", [1, 20])
def test_dense_layouts(layout, rows):
    batch, heads, kv_heads, dim, length = 2, 4, 2, 64, 20
    query = torch.randn(batch, rows, heads, dim).half()
    keys, values = (torch.randn(batch, length, kv_heads, dim).half() for _ in range(2))
    mask = torch.ones(rows, length).triu(length - rows + 1).bool()

    def arranged(t):
        if layout == "BNSD":
            return t.transpose(1, 2).contiguous().npu()
        return (t if layout == "BSND" else t.flatten(2)).npu()

    out, _ = torch_npu.npu_fused_infer_attention_score(
        arranged(query),
        arranged(keys),
        arranged(values),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=dim**-0.5,
        input_layout=layout,
        atten_mask=mask.npu()[None, None] if rows > 1 else None,
    )

    for b in range(batch):
        got = out[b].transpose(0, 1) if layout == "BNSD" else out[b].view(rows, heads, dim)
        causal = mask if rows > 1 else None
        want, _ = reference(query[b], keys[b], values[b], heads, kv_heads, mask=causal)
        assert_close(got, want)


@pytest.mark.parametrize("rows", [[1, 1], [5, 40]])
def test_a_sink_takes_a_part_of_the_attention(rows):
    heads, kv_heads, dim = 4, 2, 64
    pages = Pages([n + 30 for n in rows], kv_heads, dim, 16, torch.bfloat16)
    query, sinks = torch.randn(sum(rows), heads, dim).bfloat16(), torch.randn(heads).bfloat16()

    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(),
        *(c.npu().view(len(c), 16, -1) for c in (pages.keys, pages.values)),
        actual_seq_qlen=[rows[0], sum(rows)],
        actual_seq_kvlen=pages.lengths,
        block_table=pages.table.npu(),
        num_query_heads=heads,
        num_key_value_heads=kv_heads,
        softmax_scale=dim**-0.5,
        input_layout="TND",
        block_size=16,
        sparse_mode=3,
        atten_mask=CAUSAL.npu(),
        learnable_sink=sinks.npu(),
    )

    start = 0
    for b, n in enumerate(rows):
        keys, values = pages.tokens(pages.keys, b), pages.tokens(pages.values, b)
        part = slice(start, start + n)
        plain, sums = reference(query[part], keys, values, heads, kv_heads, True)
        share = torch.sigmoid(sums.view(n, heads) - sinks.float())
        assert_close(out[part], plain * share[..., None])
        start += n


def test_the_second_interface_and_its_out_variant_agree():
    heads, kv_heads, dim = 4, 2, 64
    pages = Pages([33, 17], kv_heads, dim, 16, torch.bfloat16)
    query = torch.randn(2, heads, dim).bfloat16()
    first, _ = paged_attention(query, pages, [1, 1], heads, kv_heads)
    arguments = {
        "actual_seq_qlen": [1, 2],
        "actual_seq_kvlen": pages.lengths,
        "block_table": pages.table.npu(),
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "softmax_scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": 16,
    }
    flat = [c.npu().view(len(c), 16, -1) for c in (pages.keys, pages.values)]

    second, _ = torch_npu.npu_fused_infer_attention_score_v2(query.npu(), *flat, **arguments)
    workspace = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(
        query.npu(), *flat, **arguments
    )
    out, lse = torch.empty_like(second), torch.empty(1, dtype=torch.bfloat16, device="npu")
    torch_npu.npu_fused_infer_attention_score_v2.out(
        query.npu(), *flat, **arguments, workspace=workspace, out=[out, lse]
    )

    assert torch.equal(first.cpu(), second.cpu())
    assert torch.equal(out.cpu(), second.cpu())
