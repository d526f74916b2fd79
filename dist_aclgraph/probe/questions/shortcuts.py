"""Questions about calls that CANN's documents exclude, or about which the documents contradict each
other. With some of these calls, the runtime would need fewer operators, fewer copies or less
memory. vllm-ascend avoids the other calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, Bench, Probe
from dist_aclgraph.probe.questions.limits import NUM_GROUPS, multiply_experts

HALF_OF_A_GROUP = 128  # number of inputs that share a scale in many published int4 weights


def _ints(bench: Bench, *values: int) -> Any:
    return bench.torch.tensor(values, dtype=bench.torch.int32).npu()


def _zeros(bench: Bench, *shape: int) -> Any:
    return bench.torch.zeros(*shape).bfloat16().npu()


def _delta(bench: Bench, **others: Any) -> str:
    """Decode one token of a request."""
    torch = bench.torch
    rows = [_zeros(bench, 1, heads, 128) for heads in (2, 2, 4)]
    accepted = {"num_accepted_tokens": _ints(bench, 1)} | others
    torch.ops.npu.npu_recurrent_gated_delta_rule(
        *rows,
        _zeros(bench, 2, 4, 128, 128),
        beta=_zeros(bench, 1, 4),
        scale=0.1,
        actual_seq_lengths=_ints(bench, 1),
        ssm_state_indices=_ints(bench, 1),
        **accepted,
    )
    return ACCEPTED


def _delta_by_channel(bench: Bench) -> str:
    return _delta(bench, gk=bench.torch.zeros(1, 4, 128).npu())


def _delta_without_accepted(bench: Bench) -> str:
    return _delta(bench, g=bench.torch.zeros(1, 4).npu(), num_accepted_tokens=None)


def _rotation(bench: Bench, dtype: str, sections: tuple[int, ...]) -> str:
    torch = bench.torch
    shape = (3, 2) if any(sections) else (2,)
    bench.ops.npu_mrope(
        torch.zeros(*shape, dtype=getattr(torch, dtype)).npu(),
        *(_zeros(bench, *size) for size in ((2, 256), (2, 128), (4, 128))),
        128,
        mrope_section=list(sections),
        rotary_mode="half",
    )
    return ACCEPTED


def _narrow_experts(bench: Bench) -> str:
    """Multiply by weights with 48 columns. A block of FRACTAL_NZ has 32 columns of int8, so the
    second block is half empty.
    """
    torch = bench.torch
    return multiply_experts(
        bench,
        torch.zeros(2, 64, dtype=torch.int8).npu(),
        bench.to_fractal_nz(torch.zeros(NUM_GROUPS, 64, 48, dtype=torch.int8).npu()),
        scale=[_zeros(bench, NUM_GROUPS, 48)],
        per_token_scale=[torch.ones(2).npu()],
        output_dtype=torch.bfloat16,
    )


def _narrow_grouped_swiglu(bench: Bench) -> str:
    torch, columns = bench.torch, 96
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


def _int4_experts(bench: Bench) -> str:
    torch, inputs = bench.torch, 2 * HALF_OF_A_GROUP
    return multiply_experts(
        bench,
        torch.zeros(2, inputs, dtype=torch.int8).npu(),
        torch.zeros(NUM_GROUPS, inputs, 8, dtype=torch.int32).npu(),  # 64 outputs of four bits
        bias=[torch.zeros(NUM_GROUPS, 64).npu()],
        scale=[torch.ones(NUM_GROUPS, 2, 64, dtype=torch.int64).npu()],
        per_token_scale=[torch.ones(2).npu()],
        output_dtype=torch.bfloat16,
    )


def _int4_experts_without_offset(bench: Bench) -> str:
    torch = bench.torch
    return multiply_experts(
        bench,
        _zeros(bench, 2, 256),
        torch.zeros(NUM_GROUPS, 256, 8, dtype=torch.int32).npu(),
        antiquant_scale=[_zeros(bench, NUM_GROUPS, 2, 64)],
    )


def _int4_product(bench: Bench) -> str:
    torch, inputs = bench.torch, 2 * HALF_OF_A_GROUP
    torch.ops.npu.npu_quant_matmul(
        torch.zeros(2, inputs, dtype=torch.int8).npu(),
        torch.zeros(inputs, 8, dtype=torch.int32).npu(),
        torch.ones(2, 64, dtype=torch.int64).npu(),
        offset=torch.zeros(64).npu(),
        pertoken_scale=torch.ones(2, 1).npu(),
        output_dtype=torch.bfloat16,
        group_sizes=[0, 0, HALF_OF_A_GROUP],
    )
    return ACCEPTED


def _gating(bench: Bench) -> str:
    logits = bench.torch.zeros(2, 8).npu()
    bench.torch.ops.npu.npu_moe_gating_top_k(logits, 2, renorm=1)
    return ACCEPTED


def _turned_weights(bench: Bench) -> str:
    """Multiply the latents that attention returns by the value matrices, [heads, d, latent]."""
    bench.torch.ops.npu.npu_transpose_batchmatmul(
        _zeros(bench, 4, 2, 512),
        _zeros(bench, 4, 128, 512),
        perm_x1=[0, 1, 2],
        perm_x2=[0, 2, 1],
        perm_y=[1, 0, 2],
    )
    return ACCEPTED


def _indexer(bench: Bench) -> str:
    bench.torch.ops.npu.npu_lightning_indexer(
        _zeros(bench, 1, 64, 128),
        _zeros(bench, 1, 128, 1, 128),
        bench.torch.zeros(1, 64).npu(),
        actual_seq_lengths_query=_ints(bench, 1),
        actual_seq_lengths_key=_ints(bench, 4),
        block_table=_ints(bench, 0).view(1, 1),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=64,
        sparse_mode=3,
    )
    return ACCEPTED


def _sparse_sums(bench: Bench) -> str:
    latents, turned = (_zeros(bench, 1, 128, 1, d) for d in (512, 64))
    bench.torch.ops.npu.npu_sparse_flash_attention(
        _zeros(bench, 1, 16, 512),
        latents,
        latents,
        _ints(bench, 0).view(1, 1, 1),
        0.1,
        block_table=_ints(bench, 0).view(1, 1),
        actual_seq_lengths_query=_ints(bench, 1),
        actual_seq_lengths_kv=_ints(bench, 1),
        query_rope=_zeros(bench, 1, 16, 64),
        key_rope=turned,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
        return_softmax_lse=True,
    )
    return ACCEPTED


# Each case consists of its name, the subject of the question, the call, and a part of the
# emulator's error text.
_CASES: tuple[tuple[str, str, Callable[[Bench], str], str | None], ...] = (
    (
        "delta_by_channel",
        "npu_recurrent_gated_delta_rule with a decay for each channel (Kimi Linear)",
        _delta_by_channel,
        "gk is not supported yet",
    ),
    (
        "delta_without_accepted",
        "npu_recurrent_gated_delta_rule without num_accepted_tokens",
        _delta_without_accepted,
        "num_accepted_tokens must be given",
    ),
    (
        "rotation_by_int32",
        "npu_mrope with positions of int32",
        partial(_rotation, dtype="int32", sections=(0, 0, 0)),
        "positions must be int64",
    ),
    (
        "rotation_in_sections_of_24_20_20",
        "npu_mrope with sections of 24, 20 and 20 (Qwen3-VL)",
        partial(_rotation, dtype="int64", sections=(24, 20, 20)),
        "the sections must be",
    ),
    (
        "fractal_nz_experts_48",
        "a product of int8 experts in FRACTAL_NZ with 48 columns",
        _narrow_experts,
        "does not fill the blocks",
    ),
    (
        "int4_group_128",
        "an int4 product with a scale for each 128 inputs",
        _int4_product,
        None,
    ),
    (
        "int4_experts_group_128",
        "a product of int8 rows and int4 experts with a scale for each 128 inputs",
        _int4_experts,
        None,
    ),
    (
        "int4_experts_without_offset",
        "a product of bfloat16 rows and int4 experts without offsets",
        _int4_experts_without_offset,
        None,
    ),
    (
        "gating_renorm",
        "npu_moe_gating_top_k that divides the chosen softmax scores by their sum (renorm)",
        _gating,
        None,
    ),
    (
        "product_of_turned_weights",
        "npu_transpose_batchmatmul of turned weights",
        _turned_weights,
        None,
    ),
    (
        "indexer_float_weights",
        "npu_lightning_indexer with weights of float32",
        _indexer,
        None,
    ),
    (
        "sparse_attention_sums_in_pages",
        "npu_sparse_flash_attention with pages and log-sum-exps",
        _sparse_sums,
        None,
    ),
)

PROBES = (
    *(
        Probe(f"rules.{name}", f"Is {what} accepted?", call, REFUSED, rule=rule)
        for name, what, call, rule in _CASES
    ),
    Probe(
        "rules.grouped_swiglu_96",
        "Is npu_grouped_matmul_swiglu_quant_v2 with 96 columns accepted?",
        _narrow_grouped_swiglu,
        REFUSED,
        rule="columns of weight are no multiple",
    ),
)
