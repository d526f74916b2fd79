"""Compares operators of layers and sampler with the host, at the shapes of published models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dist_aclgraph.probe.question import (
    DIFFERENT,
    EQUAL,
    REFUSED,
    Answer,
    Bench,
    ByCann,
    Level,
    Probe,
)

BFLOAT16, FLOAT32 = 3e-2, 1e-4  # tolerances
HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 1024, 32, 8, 128, 128  # numbers of heads as in Qwen3-8B
LATENT, ROTATED = 512, 64  # widths as in DeepSeek's latent attention
VOCABULARY = 32_000
VERSION_2 = {  # npu_fused_infer_attention_score: names of arguments -> their names in version 2
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}


def _random(bench: Bench, *shape: int) -> Any:
    return bench.torch.randn(*shape).bfloat16()


def _int8(bench: Bench, *shape: int) -> Any:
    return bench.torch.randint(-127, 128, shape, dtype=bench.torch.int8)


def _normed(x: Any, gamma: Any) -> Any:
    f = x.float()
    return f * (f.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.float()


def _matmul(bench: Bench) -> Answer:
    a, b = _random(bench, 16, HIDDEN), _random(bench, HIDDEN, 256) / 32
    return bench.compare(a.npu() @ b.npu(), a.float() @ b.float(), BFLOAT16)


def _rms_norm(bench: Bench) -> Answer:
    x, gamma = _random(bench, 16, HIDDEN), _random(bench, HIDDEN)
    got = bench.ops.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)[0]
    return bench.compare(got, _normed(x, gamma), BFLOAT16)


def _add_rms_norm(bench: Bench) -> Answer:
    x, residual, gamma = (_random(bench, *s) for s in ((16, HIDDEN), (16, HIDDEN), (HIDDEN,)))
    got, _, total = bench.ops.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-6)
    summed = bench.compare(total, x.float() + residual.float(), BFLOAT16)
    if summed.found != EQUAL:
        return summed
    return bench.compare(got, _normed(total.cpu(), gamma), BFLOAT16)


def _quantised_norm(bench: Bench) -> Answer:
    x, residual, gamma = (_random(bench, *s) for s in ((16, HIDDEN), (16, HIDDEN), (HIDDEN,)))
    got, _, total, scale, _ = bench.ops.npu_add_rms_norm_dynamic_quant(
        x.npu(), residual.npu(), gamma.npu(), epsilon=1e-6, output_mask=[True, False]
    )
    summed = bench.compare(total, x.float() + residual.float(), BFLOAT16)
    if summed.found != EQUAL:
        return summed
    return _compare_int8(bench, got, scale, _normed(x.float() + residual.float(), gamma))


def _compare_int8(
    bench: Bench, got: Any, scale: Any, want: Any, largest_steps: float = 0.51
) -> Answer:
    """Compare int8 rows and their scales with ``want``, the rows before quantisation."""
    step = want.abs().amax(-1) / 127
    back = got.cpu().float() * scale.cpu()[:, None]
    if bool(((back - want).abs() > step[:, None] * largest_steps).any()):
        return Answer(DIFFERENT, f"a value is more than {largest_steps:g} steps off")
    return bench.compare(scale, step, FLOAT32)


def _gemma_rms_norm(bench: Bench) -> Answer:
    x, gamma = _random(bench, 16, HIDDEN), _random(bench, HIDDEN)
    got = bench.ops.npu_gemma_rms_norm(x.npu(), gamma.npu(), 1e-6)[0]
    return bench.compare(got, _normed(x, 1 + gamma.float()), BFLOAT16)


def _swiglu(bench: Bench) -> Answer:
    x = _random(bench, 16, 2 * HIDDEN)
    gate, up = x.float().chunk(2, -1)
    return bench.compare(bench.ops.npu_swiglu(x.npu()), gate * gate.sigmoid() * up, BFLOAT16)


def _quantised_swiglu(bench: Bench) -> Answer:
    x = _random(bench, 16, 2 * HIDDEN)
    gate, up = x.float().chunk(2, -1)
    got, scale = bench.ops.npu_dequant_swiglu_quant(x.npu(), activate_left=True, quant_mode=1)
    return _compare_int8(bench, got, scale, gate * gate.sigmoid() * up)


def _clipped_swiglu(bench: Bench) -> Answer:
    """Compute clipped SwiGLU with gpt-oss's constants. The columns of gate and up alternate."""
    x, alpha, limit = 4 * _random(bench, 16, 2 * HIDDEN), 1.702, 7.0
    got = bench.ops.npu_clipped_swiglu(
        x.npu(), alpha=alpha, limit=limit, bias=1.0, interleaved=True
    )
    gate, up = x[:, ::2].float().clamp(max=limit), x[:, 1::2].float().clamp(-limit, limit)
    return bench.compare(got, gate * (alpha * gate).sigmoid() * (up + 1), BFLOAT16)


def _rotary_mul(bench: Bench) -> Answer:
    x, angles = _random(bench, 1, 16, HEADS, DIM), bench.torch.randn(1, 16, 1, DIM)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    got = bench.ops.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), "half")
    half = x.float().chunk(2, -1)
    turned = bench.torch.cat([-half[1], half[0]], -1)
    return bench.compare(got, x.float() * cos.float() + turned * sin.float(), BFLOAT16)


def _cache_write(bench: Bench) -> Answer:
    rows = _random(bench, 4, KV_HEADS, DIM)
    cache = bench.torch.zeros(3, BLOCK, KV_HEADS, DIM).bfloat16()
    keys, values = cache.npu(), cache.npu()
    slots = bench.torch.tensor([5, -1, 2 * BLOCK, 0], dtype=bench.torch.int32)
    bench.ops.npu_scatter_pa_kv_cache(
        rows.npu(), rows.npu(), keys, values, slots.npu(), cache_mode="Norm"
    )
    flat = cache.view(3 * BLOCK, KV_HEADS, DIM)
    flat[[5, 2 * BLOCK, 0]] = rows[[0, 2, 3]]  # a slot of -1 is skipped
    return bench.compare(keys, cache)


def _row_write(bench: Bench) -> Answer:
    rows, cache = _random(bench, 3, DIM), bench.torch.zeros(8, DIM).bfloat16()
    at = bench.torch.tensor([[5], [0], [7]], dtype=bench.torch.int32)
    written = cache.npu()
    bench.ops.npu_scatter_nd_update_(written, at.npu(), rows.npu())
    cache[at[:, 0].long()] = rows
    return bench.compare(written, cache)


def _dynamic_quant(bench: Bench) -> Answer:
    x = _random(bench, 16, HIDDEN)
    got, scale = bench.ops.npu_dynamic_quant(x.npu())
    return _compare_int8(bench, got, scale, x.float())


def _quant_matmul(bench: Bench) -> Answer:
    torch = bench.torch
    a, b = _int8(bench, 16, HIDDEN), _int8(bench, HIDDEN, 256)
    scale, rows = torch.rand(256) * 1e-3, torch.rand(16) * 1e-3
    got = bench.ops.npu_quant_matmul(
        a.npu(), b.npu(), scale.npu(), pertoken_scale=rows.npu(), output_dtype=torch.bfloat16
    )
    return bench.compare(got, (a.float() @ b.float()) * scale * rows[:, None], BFLOAT16)


def _grouped_matmul(bench: Bench) -> Answer:
    torch = bench.torch
    x, weight, sizes = _random(bench, 16, 256), _random(bench, 4, 256, 128) / 16, [3, 0, 9, 4]
    got = bench.ops.npu_grouped_matmul(
        [x.npu()],
        [weight.npu()],
        group_list=torch.tensor(sizes).npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
    )[0]
    parts = zip(x.float().split(sizes), weight.float(), strict=True)
    return bench.compare(got, torch.cat([part @ w for part, w in parts]), BFLOAT16)


def _fractal_nz(bench: Bench) -> Answer:
    weight = _int8(bench, 4, 256, 128)
    return bench.compare(bench.to_fractal_nz(weight.npu()), weight)


def _grouped_swiglu(bench: Bench) -> Answer:
    torch, sizes = bench.torch, [3, 0, 9, 4]
    x, weight = _int8(bench, 16, 256), _int8(bench, 4, 256, 512)
    scales, rows = torch.rand(4, 512) * 1e-3, torch.rand(16) * 1e-3
    stored, counts = [bench.to_fractal_nz(weight.npu())], torch.tensor(sizes).npu()
    got, scale = bench.ops.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(), stored, [scales.npu()], rows.npu(), counts, group_list_type=1
    )
    parts = zip(x.float().split(sizes), weight.float(), scales, strict=True)
    sums = torch.cat([part @ w * s for part, w, s in parts]) * rows[:, None]
    gate, up = sums.chunk(2, -1)
    return _compare_int8(bench, got, scale, gate * gate.sigmoid() * up)


def _gating(bench: Bench) -> Answer:
    logits = bench.torch.randn(16, 128)
    weights, experts, _ = bench.ops.npu_moe_gating_top_k(logits.npu(), 8, norm_type=0)
    want = logits.softmax(-1).topk(8, -1)
    chosen = bench.compare(experts, want.indices)
    if chosen.found != EQUAL:
        return chosen
    return bench.compare(weights, want.values, FLOAT32)


def _quantised_routing(bench: Bench) -> Answer:
    x, experts = _random(bench, 16, HIDDEN), bench.torch.arange(16, dtype=bench.torch.int32) % 4
    order = bench.torch.argsort(experts, stable=True)
    got, _, _, scale = bench.ops.npu_moe_init_routing_v2(
        x.npu(),
        experts[:, None].npu(),
        active_num=16,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
        quant_mode=1,
    )
    # The kernel truncates quotients to the precision of float16 before it rounds them to int8.
    return _compare_int8(bench, got, scale, x[order].float(), largest_steps=0.57)


def _cumsum(bench: Bench) -> Answer:
    flags = bench.torch.randint(0, 2, (64, 16), dtype=bench.torch.int32)
    got = flags.npu().cumsum(0, dtype=bench.torch.int32)
    return bench.compare(got, flags.cumsum(0))


def _sort(bench: Bench) -> Answer:
    x = bench.torch.randint(0, 1000, (1, VOCABULARY)).float()  # contains many equal values
    got, want = (t.sort(dim=-1, descending=True, stable=True) for t in (x.npu(), x))
    return bench.compare(got.indices, want.indices)


def _top_k_top_p(bench: Bench) -> Answer:
    torch = bench.torch
    logits = torch.randn(4, VOCABULARY)
    top_k = torch.full((4,), 20, dtype=torch.int32)
    got = bench.ops.npu_top_k_top_p(logits.npu(), None, top_k.npu())
    least = logits.topk(20, -1).values[:, -1:]
    return bench.compare(got, logits.masked_fill(logits < least, -math.inf))


def _argmax_of_equals(bench: Bench) -> str:
    return f"index {bench.torch.ones(1, 1024).npu().argmax(-1).item()}"


def _argmax_into_int32(bench: Bench) -> str:
    torch = bench.torch
    indices = torch.empty(2, dtype=torch.int32).npu()
    torch.argmax(torch.arange(2048.0).view(2, 1024).npu(), -1, out=indices)
    return f"indices {indices.tolist()}"


def _int32_wraps(bench: Bench) -> str:
    torch = bench.torch
    x = torch.tensor([1 << 30, -(1 << 31), 123_456_789], dtype=torch.int32)
    got = torch.mul(x.npu(), x.npu())
    return "wraps" if torch.equal(got.cpu(), x * x) else "does not wrap"


def _merge_of_shares(bench: Bench) -> Answer:
    torch = bench.torch
    sums = [torch.randn(16) * 5 for _ in range(3)]
    outs = [torch.randn(16, DIM) for _ in range(3)]
    got, _ = bench.ops.npu_attention_update([s.npu() for s in sums], [o.npu() for o in outs], 1)
    weights = torch.stack(sums).softmax(0)[..., None]
    return bench.compare(got, (weights * torch.stack(outs)).sum(0), FLOAT32)


def blocks_in_order(bench: Bench, keys: Any, num_requests: int) -> Any:
    """Return the block table of requests that all have the same number of blocks."""
    table = bench.torch.arange(len(keys), dtype=bench.torch.int32)
    return table.view(num_requests, -1).npu()


def attention_arguments(
    query: Any, keys: Any, values: Any, lengths: list[int], table: Any
) -> dict[str, Any]:
    """Return the arguments of grouped-query attention with one row for each request."""
    return {
        "query": query,
        "key": keys.view(len(keys), BLOCK, -1),
        "value": values.view(len(values), BLOCK, -1),
        "actual_seq_lengths": list(range(1, len(lengths) + 1)),
        "actual_seq_lengths_kv": lengths,
        "block_table": table,
        "num_heads": query.shape[1],
        "num_key_value_heads": keys.shape[2],
        "scale": DIM**-0.5,
        "input_layout": "TND",
        "block_size": BLOCK,
    }


def in_version_2(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of attention under the names that version 2 of the operator requires."""
    return {VERSION_2.get(name, name): value for name, value in arguments.items()}


def attention(bench: Bench, query: Any, keys: Any, values: Any, lengths: list[int]) -> Any:
    """Return grouped-query attention with one row per request. The blocks are in order."""
    table = blocks_in_order(bench, keys, len(lengths))
    arguments = attention_arguments(query, keys, values, lengths, table)
    return bench.ops.npu_fused_infer_attention_score(**arguments)[0]


def attention_on_host(bench: Bench, query: Any, keys: Any, values: Any, lengths: list[int]) -> Any:
    """Return the result that ``attention`` should have, computed on the host in float32."""
    columns = keys.shape[0] // len(lengths)
    group = query.shape[1] // keys.shape[2]
    rows = []
    for i, length in enumerate(lengths):
        part = slice(i * columns, (i + 1) * columns)
        k, v = (
            c[part].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for c in (keys, values)
        )
        scores = bench.torch.einsum("hd,khd->hk", query[i].float(), k) * DIM**-0.5
        rows.append(bench.torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return bench.torch.stack(rows)


def _decode(bench: Bench) -> Answer:
    lengths = [1, 127, 128, 1000]
    query = _random(bench, 4, HEADS, DIM)
    keys, values = (_random(bench, 32, BLOCK, KV_HEADS, DIM) for _ in range(2))
    got = attention(bench, query.npu(), keys.npu(), values.npu(), lengths)
    return bench.compare(got, attention_on_host(bench, query, keys, values, lengths), BFLOAT16)


def _prefill(bench: Bench) -> Answer:
    """Compute causal attention for new tokens that follow cached tokens."""
    torch, rows, cached = bench.torch, 40, 100
    query = _random(bench, rows, HEADS, DIM)
    keys, values = (_random(bench, 2, BLOCK, KV_HEADS, DIM) for _ in range(2))
    table = blocks_in_order(bench, keys, 1)
    arguments = attention_arguments(
        query.npu(), keys.npu(), values.npu(), [cached + rows], table
    ) | {
        "actual_seq_lengths": [rows],
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu(),
        "sparse_mode": 3,
    }
    got = bench.ops.npu_fused_infer_attention_score(**arguments)[0]
    want = [
        attention_on_host(bench, query[i : i + 1], keys, values, [cached + i + 1])
        for i in range(rows)
    ]
    return bench.compare(got, torch.cat(want), BFLOAT16)


def _sinks(bench: Bench) -> Answer:
    """Compute attention with sinks: each head has one additional logit without a value."""
    torch, length = bench.torch, 200
    query, sinks = _random(bench, 1, HEADS, DIM), _random(bench, HEADS)
    keys, values = (_random(bench, 2, BLOCK, KV_HEADS, DIM) for _ in range(2))
    table = blocks_in_order(bench, keys, 1)
    arguments = attention_arguments(query.npu(), keys.npu(), values.npu(), [length], table)
    got = bench.ops.npu_fused_infer_attention_score_v2(
        **in_version_2(arguments), learnable_sink=sinks.npu()
    )[0]
    k, v = (
        c.flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1)
        for c in (keys, values)
    )
    scores = torch.einsum("hd,khd->hk", query[0].float(), k) * DIM**-0.5
    weights = torch.cat([scores, sinks.float()[:, None]], -1).softmax(-1)[:, :-1]
    return bench.compare(got, torch.einsum("hk,khd->hd", weights, v)[None], BFLOAT16)


def _routing(bench: Bench) -> Answer:
    """Send tokens to identity experts, and add up the returned tokens."""
    torch, num_tokens, num_experts, chosen = bench.torch, 16, 8, 2
    x, weights = _random(bench, num_tokens, 256), torch.rand(num_tokens, chosen).bfloat16()
    experts = torch.stack([torch.randperm(num_experts)[:chosen] for _ in range(num_tokens)])
    rows, index, _, _ = bench.ops.npu_moe_init_routing_v2(
        x.npu(),
        experts.int().npu(),
        active_num=num_tokens * chosen,
        expert_num=num_experts,
        active_expert_range=[0, num_experts],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        row_idx_type=0,
    )
    got = bench.ops.npu_moe_finalize_routing(
        rows[None], None, None, None, weights.npu(), index, None, drop_pad_mode=3
    )
    return bench.compare(got, x.float() * weights.float().sum(-1, keepdim=True), BFLOAT16)


def _latent_decode(bench: Bench) -> Answer:
    heads, length = 16, 200
    query, rotated = _random(bench, 1, heads, LATENT), _random(bench, 1, heads, ROTATED)
    keys, turned = _random(bench, 2, BLOCK, LATENT), _random(bench, 2, BLOCK, ROTATED)
    scale = (DIM + ROTATED) ** -0.5 / 4
    got = bench.ops.npu_fused_infer_attention_score_v2(
        query.npu(),
        keys.npu(),
        keys.npu(),
        query_rope=rotated.npu(),
        key_rope=turned.npu(),
        actual_seq_qlen=[1],
        actual_seq_kvlen=[length],
        block_table=bench.torch.arange(2, dtype=bench.torch.int32).view(1, 2).npu(),
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="TND_NTD",
        block_size=BLOCK,
    )[0]
    k, r = (c.flatten(0, 1)[:length].float() for c in (keys, turned))
    scores = (query[0].float() @ k.t() + rotated[0].float() @ r.t()) * scale
    want = (scores.softmax(-1) @ k)[:, None]  # [heads, 1, 512]
    return bench.compare(got, want, BFLOAT16)


def _equal(
    name: str,
    what: str,
    call: Callable[[Bench], Answer],
    operator: str | None = None,
    level: Level = "full",
) -> Probe:
    question = f"Is {what} as on the host?"
    return Probe(f"operators.{name}", question, call, EQUAL, level, operator=operator)


PROBES = (
    _equal("matmul", "a product", _matmul, level="quick"),
    _equal("rms_norm", "npu_rms_norm", _rms_norm, "aclnnRmsNorm"),
    _equal("add_rms_norm", "npu_add_rms_norm", _add_rms_norm, "aclnnAddRmsNorm"),
    _equal("gemma_rms_norm", "npu_gemma_rms_norm", _gemma_rms_norm, "aclnnGemmaRmsNorm"),
    _equal(
        "add_rms_norm_dynamic_quant",
        "npu_add_rms_norm_dynamic_quant",
        _quantised_norm,
        "aclnnAddRmsNormDynamicQuantV2",
    ),
    _equal(
        "dequant_swiglu_quant",
        "npu_dequant_swiglu_quant, without group_index,",
        _quantised_swiglu,
        "aclnnDequantSwigluQuantV2",
    ),
    _equal("swiglu", "npu_swiglu", _swiglu, "aclnnSwiGlu"),
    _equal("clipped_swiglu", "npu_clipped_swiglu (gpt-oss)", _clipped_swiglu, "aclnnClippedSwiglu"),
    _equal("rotary_mul", "npu_rotary_mul", _rotary_mul, "aclnnRotaryPositionEmbedding"),
    _equal(
        "cache_write",
        "npu_scatter_pa_kv_cache, with a slot of -1,",
        _cache_write,
        "aclnnScatterPaKvCache",
    ),
    _equal("row_write", "npu_scatter_nd_update_", _row_write, "aclnnScatterNdUpdate"),
    _equal("decode", "attention of a decode step (Qwen3-8B)", _decode, level="quick"),
    _equal("prefill", "causal attention of a prompt (Qwen3-8B)", _prefill),
    _equal("sinks", "attention with sinks (gpt-oss)", _sinks),
    _equal("latent_decode", "latent attention of a decode step (DeepSeek)", _latent_decode),
    _equal("merge_of_shares", "npu_attention_update", _merge_of_shares, "aclnnAttentionUpdate"),
    _equal("dynamic_quant", "npu_dynamic_quant", _dynamic_quant, "aclnnDynamicQuantV2"),
    _equal("quant_matmul", "npu_quant_matmul", _quant_matmul, "aclnnQuantMatmulV5"),
    _equal("grouped_matmul", "npu_grouped_matmul", _grouped_matmul),
    _equal("fractal_nz", "a cast of weights to FRACTAL_NZ and back", _fractal_nz),
    Probe(
        "operators.grouped_matmul_swiglu_quant",
        "Is npu_grouped_matmul_swiglu_quant_v2 as on the host?",
        _grouped_swiglu,
        ByCann(REFUSED, EQUAL),
        operator="aclnnGroupedMatmulSwigluQuantWeightNzV2",
    ),
    _equal("gating", "npu_moe_gating_top_k", _gating, "aclnnMoeGatingTopK"),
    _equal("routing", "routing to experts and back", _routing),
    _equal("quantised_routing", "routing to experts, with quantisation,", _quantised_routing),
    _equal("cumsum", "a running sum of int32", _cumsum),
    _equal("sort", "a stable sort", _sort),
    _equal("top_k_top_p", "npu_top_k_top_p", _top_k_top_p, "aclnnApplyTopKTopP"),
    Probe(
        "operators.argmax_of_equals",
        "Which index does argmax give if all values are equal?",
        _argmax_of_equals,
        "index 0",
    ),
    Probe(
        "operators.argmax_into_int32",
        "Does argmax write indices of int32? Sampling needs it.",
        _argmax_into_int32,
        "indices [1023, 1023]",
    ),
    Probe(
        "operators.int32_wraps",
        "Do products of int32 wrap? Sampling needs it.",
        _int32_wraps,
        "wraps",
    ),
)
