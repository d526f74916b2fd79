"""Questions about limits. Published models or padded steps of the runtime can exceed these limits.

The documents of CANN exclude these calls. If a device accepts a call, the runtime can drop a cast,
an additional copy, or a slower path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, Bench, ByCann, Probe

NUM_GROUPS = 2  # number of experts


def multiply_experts(bench: Bench, x: Any, weight: Any, **others: Any) -> str:
    """For each of ``NUM_GROUPS`` experts, multiply one row by the expert's matrix."""
    bench.torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=bench.torch.ones(NUM_GROUPS, dtype=bench.torch.int64).npu(),
        group_list_type=1,
        group_type=0,
        split_item=3,
        **others,
    )
    return ACCEPTED


def _bias_of_experts(bench: Bench) -> str:
    torch = bench.torch
    x, weight, bias = (
        torch.zeros(*shape).bfloat16().npu()
        for shape in ((2, 64), (NUM_GROUPS, 64, 32), (NUM_GROUPS, 32))
    )
    return multiply_experts(bench, x, weight, bias=[bias])


def _float_scales_of_experts(bench: Bench) -> str:
    torch = bench.torch
    x, weight = (
        torch.zeros(*shape, dtype=torch.int8).npu() for shape in ((2, 64), (NUM_GROUPS, 64, 32))
    )
    return multiply_experts(
        bench,
        x,
        weight,
        scale=[torch.ones(NUM_GROUPS, 32).npu()],
        per_token_scale=[torch.ones(2).npu()],
        output_dtype=torch.bfloat16,
    )


def _int4_experts(bench: Bench, inputs: int) -> str:
    torch = bench.torch
    return multiply_experts(
        bench,
        torch.zeros(2, inputs, dtype=torch.int8).npu(),
        torch.zeros(NUM_GROUPS, inputs, 8, dtype=torch.int32).npu(),  # 64 outputs of four bits
        bias=[torch.zeros(NUM_GROUPS, 64).npu()],
        scale=[torch.ones(NUM_GROUPS, 1, 64, dtype=torch.int64).npu()],
        per_token_scale=[torch.ones(2).npu()],
        output_dtype=torch.bfloat16,
    )


def _int4_product(bench: Bench, inputs: int, group: int) -> str:
    torch = bench.torch
    scales, rows = ((inputs // group, 64), (2, 1)) if group else ((64,), (2,))
    torch.ops.npu.npu_quant_matmul(
        torch.zeros(2, inputs, dtype=torch.int8).npu(),
        torch.zeros(inputs, 8, dtype=torch.int32).npu(),
        torch.ones(*scales, dtype=torch.int64).npu(),
        offset=torch.zeros(64).npu(),
        pertoken_scale=torch.ones(*rows).npu(),
        output_dtype=torch.bfloat16,
        group_sizes=[0, 0, group] if group else None,
    )
    return ACCEPTED


def _wide_experts(bench: Bench) -> str:
    torch, columns = bench.torch, 10304
    weight = torch.zeros(NUM_GROUPS, 64, columns, dtype=torch.int8).npu()
    bench.ops.npu_grouped_matmul_swiglu_quant_v2(
        torch.zeros(2, 64, dtype=torch.int8).npu(),
        [bench.to_fractal_nz(weight)],
        [torch.ones(NUM_GROUPS, columns).npu()],
        torch.ones(2).npu(),
        torch.ones(NUM_GROUPS, dtype=torch.int64).npu(),
        group_list_type=1,
    )
    return ACCEPTED


def _quantised_swiglu(bench: Bench, width: int = 128, dtype: str = "bfloat16") -> str:
    x = bench.torch.zeros(2, width, dtype=getattr(bench.torch, dtype)).npu()
    bench.ops.npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)
    return ACCEPTED


def _product_of_128_latents(bench: Bench) -> str:
    """Compute the values of all 128 heads of DeepSeek-V3 on one rank, without tensor
    parallelism.
    """
    torch = bench.torch
    torch.ops.npu.npu_transpose_batchmatmul(
        torch.zeros(2, 128, 512).half().npu(),
        torch.zeros(128, 512, 128).half().npu(),
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
    )
    return ACCEPTED


def _lengths(bench: Bench, *values: int) -> Any:
    return bench.torch.tensor(values, dtype=bench.torch.int32).npu()


def _delta_of_prompt(bench: Bench, dim: int = 128, dtype: str = "bfloat16") -> str:
    torch = bench.torch
    half = getattr(torch, dtype)
    rows = [torch.zeros(2, heads, dim, dtype=half).npu() for heads in (2, 2, 4)]
    torch.ops.npu.npu_chunk_gated_delta_rule(
        *rows,
        beta=torch.zeros(2, 4, dtype=half).npu(),
        g=torch.zeros(2, 4).npu(),
        initial_state=torch.zeros(1, 4, dim, dim, dtype=half).npu(),
        actual_seq_lengths=_lengths(bench, 2),
        scale=0.1,
    )
    return ACCEPTED


def _delta_of_few_slots(bench: Bench) -> str:
    """Decode two tokens of a request that has only one slot for states."""
    torch = bench.torch
    rows = [torch.zeros(2, heads, 128).bfloat16().npu() for heads in (2, 2, 4)]
    torch.ops.npu.npu_recurrent_gated_delta_rule(
        *rows,
        torch.zeros(1, 4, 128, 128).bfloat16().npu(),
        beta=torch.zeros(2, 4).bfloat16().npu(),
        g=torch.zeros(2, 4).npu(),
        scale=0.1,
        actual_seq_lengths=_lengths(bench, 2),
        ssm_state_indices=_lengths(bench, 0, 0),
        num_accepted_tokens=_lengths(bench, 1),
    )
    return ACCEPTED


def _indexer(bench: Bench, heads: int = 64, block: int = 128) -> str:
    torch = bench.torch
    torch.ops.npu.npu_lightning_indexer(
        torch.zeros(1, heads, 128).bfloat16().npu(),
        torch.zeros(1, block, 1, 128).bfloat16().npu(),
        torch.zeros(1, heads).bfloat16().npu(),
        actual_seq_lengths_query=_lengths(bench, 1),
        actual_seq_lengths_key=_lengths(bench, 4),
        block_table=_lengths(bench, 0).view(1, 1),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=64,
        sparse_mode=3,
    )
    return ACCEPTED


def _sparse_attention_of_12_heads(bench: Bench) -> str:
    torch = bench.torch
    latents, turned = (torch.zeros(1, 128, 1, d).bfloat16().npu() for d in (512, 64))
    torch.ops.npu.npu_sparse_flash_attention(
        torch.zeros(1, 12, 512).bfloat16().npu(),
        latents,
        latents,
        torch.zeros(1, 1, 1, dtype=torch.int32).npu(),
        0.1,
        block_table=_lengths(bench, 0).view(1, 1),
        actual_seq_lengths_query=_lengths(bench, 1),
        actual_seq_lengths_kv=_lengths(bench, 1),
        query_rope=torch.zeros(1, 12, 64).bfloat16().npu(),
        key_rope=turned,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
    )
    return ACCEPTED


# Each case consists of its name, the subject of the question, the call, the expected answer, and a
# part of the emulator's error text.
_CASES: tuple[tuple[str, str, Callable[[Bench], str], str | ByCann, str], ...] = (
    (
        "bias_of_experts",
        "a bias of bfloat16 beside experts of bfloat16",
        _bias_of_experts,
        REFUSED,
        "bias must be",
    ),
    (
        "float_scales_of_experts",
        "a float32 scale of int8 experts with results of bfloat16",
        _float_scales_of_experts,
        REFUSED,
        "scale must be",
    ),
    (
        "int4_experts_18688",
        "a product of int4 experts over 18688 inputs",
        partial(_int4_experts, inputs=18688),
        REFUSED,
        "may be 18432",
    ),
    (
        "int4_29696",
        "an int4 product over 29696 inputs",
        partial(_int4_product, inputs=29696, group=256),
        REFUSED,
        "may be 29576",
    ),
    (
        "int4_without_groups",
        "an int4 product with one scale for each output",
        partial(_int4_product, inputs=512, group=0),
        ByCann(REFUSED, ACCEPTED),
        "before CANN 9.0",
    ),
    (
        "grouped_swiglu_10304",
        "npu_grouped_matmul_swiglu_quant_v2 with 10304 columns",
        _wide_experts,
        REFUSED,
        "columns, at most 10240",
    ),
    (
        "quantised_swiglu_96",
        "npu_dequant_swiglu_quant with rows of 96 elements",
        partial(_quantised_swiglu, width=96),
        REFUSED,
        "no multiple of 64",
    ),
    (
        "quantised_swiglu_float16",
        "npu_dequant_swiglu_quant of float16",
        partial(_quantised_swiglu, dtype="float16"),
        REFUSED,
        "x must be bfloat16",
    ),
    (
        "product_of_128_latents",
        "npu_transpose_batchmatmul of 128 heads over 512 elements",
        _product_of_128_latents,
        REFUSED,
        "K * B of a turned input",
    ),
    (
        "delta_64",
        "npu_chunk_gated_delta_rule with heads of 64 elements",
        partial(_delta_of_prompt, dim=64),
        REFUSED,
        " must be 128, got 64",
    ),
    (
        "delta_float16",
        "npu_chunk_gated_delta_rule of float16",
        partial(_delta_of_prompt, dtype="float16"),
        REFUSED,
        "must be bfloat16, got Half (other",
    ),
    (
        "delta_of_few_slots",
        "npu_recurrent_gated_delta_rule with fewer slots than tokens",
        _delta_of_few_slots,
        REFUSED,
        "but state has only",
    ),
    (
        "indexer_96_heads",
        "npu_lightning_indexer with 96 heads",
        partial(_indexer, heads=96),
        REFUSED,
        "heads, at most 64",
    ),
    (
        "indexer_block_1040",
        "npu_lightning_indexer with blocks of 1040 keys",
        partial(_indexer, block=1040),
        REFUSED,
        "block_size 1040 must be",
    ),
    (
        "sparse_attention_12_heads",
        "npu_sparse_flash_attention with 12 heads",
        _sparse_attention_of_12_heads,
        REFUSED,
        "a power of two",
    ),
)

PROBES = tuple(
    Probe(f"rules.{name}", f"Is {what} accepted?", call, says, rule=rule)
    for name, what, call, says, rule in _CASES
)
