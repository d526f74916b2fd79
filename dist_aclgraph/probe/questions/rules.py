"""Questions about operators other than attention: calls that CANN's documents exclude."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, STOPPED, Bench, Probe


def _write(bench: Bench, cache: str = "float16", slots: str = "int32") -> str:
    torch = bench.torch
    key = torch.zeros(2, 2, 16).half().npu()
    keys, values = (torch.zeros(4, 8, 2, 16, dtype=getattr(torch, cache)).npu() for _ in "kv")
    at = torch.zeros(2, dtype=getattr(torch, slots)).npu()
    bench.ops.npu_scatter_pa_kv_cache(key, key, keys, values, at, cache_mode="Norm")
    return ACCEPTED


def _norm_weight_of_another_type(bench: Bench) -> str:
    x = bench.torch.zeros(2, 64).half().npu()
    bench.ops.npu_add_rms_norm(x, x, bench.torch.zeros(64).npu(), 1e-6)
    return ACCEPTED


def _product_of_int32(bench: Bench) -> str:
    x = bench.torch.ones(2, 2, dtype=bench.torch.int32).npu()
    bench.torch.matmul(x, x)
    return ACCEPTED


def _expert_below_zero(bench: Bench) -> str:
    torch = bench.torch
    experts = torch.tensor([[2, 0], [-1, -1]], dtype=torch.int32).npu()
    bench.ops.npu_moe_init_routing_v2(
        torch.zeros(2, 32).npu(),
        experts,
        active_num=4,
        expert_num=3,
        active_expert_range=[0, 3],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        row_idx_type=0,
    )
    return ACCEPTED


def _shares(bench: Bench, count: int, width: int = 64) -> str:
    torch = bench.torch
    sums = [torch.zeros(4).npu() for _ in range(count)]
    outs = [torch.zeros(4, width).npu() for _ in range(count)]
    bench.ops.npu_attention_update(sums, outs, 0)
    return ACCEPTED


def _gating(bench: Bench, experts: int, groups: int = 1) -> str:
    logits = bench.torch.zeros(2, experts).npu()
    bench.torch.ops.npu.npu_moe_gating_top_k(logits, 2, k_group=1, group_count=groups)
    return ACCEPTED


def _one_group_as_count(bench: Bench) -> str:
    torch = bench.torch
    torch.ops.npu.npu_grouped_matmul(
        [torch.zeros(4, 64).half().npu()],
        [torch.zeros(1, 64, 32).half().npu()],
        group_list=torch.tensor([4]).npu(),
        group_list_type=1,
        group_type=0,
        split_item=3,
    )
    return ACCEPTED


def _weights_of_another_type(bench: Bench) -> str:
    torch = bench.torch
    order = torch.arange(4, dtype=torch.int32).npu()
    torch.ops.npu.npu_moe_finalize_routing(
        torch.zeros(1, 4, 32).half().npu(),
        None,
        None,
        None,
        torch.zeros(2, 2).npu(),
        order,
        None,
        drop_pad_mode=3,
    )
    return ACCEPTED


def _rotation(bench: Bench, width: int, angles: int) -> str:
    torch = bench.torch
    x, cos = torch.zeros(1, 2, 2, width).half().npu(), torch.zeros(1, 2, 1, angles).half().npu()
    torch.ops.npu.npu_rotary_mul(x, cos, cos, "half")
    return ACCEPTED


def _rotation_of_pairs(bench: Bench) -> str:
    torch = bench.torch
    x, cos = torch.zeros(2, 4, 1, 32).half().npu(), torch.zeros(2, 1, 1, 32).half().npu()
    torch.ops.npu.npu_interleave_rope(x, cos, cos)
    return ACCEPTED


def _quantise_float32(bench: Bench) -> str:
    bench.torch.ops.npu.npu_dynamic_quant(bench.torch.ones(2, 64).npu())
    return ACCEPTED


def _quantised_product(bench: Bench) -> str:
    torch = bench.torch
    a, b = (torch.zeros(*shape, dtype=torch.int8).npu() for shape in ((1, 65536), (65536, 16)))
    torch.ops.npu.npu_quant_matmul(a, b, torch.ones(16).npu(), output_dtype=torch.bfloat16)
    return ACCEPTED


def _latent_write(bench: Bench, latent: int = 512, blocks: int = 2) -> str:
    torch = bench.torch
    angles = torch.zeros(2, 1, 1, 64).half().npu()
    rope, latents = (torch.zeros(blocks, 16, 1, d).half().npu() for d in (64, latent))
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        torch.zeros(2, 1, 1, latent + 64).half().npu(),
        torch.zeros(latent).half().npu(),
        angles,
        angles,
        torch.arange(2).npu(),
        rope,
        latents,
        cache_mode="PA",
    )
    return ACCEPTED


def _product_of_heads(bench: Bench) -> str:
    torch = bench.torch
    torch.ops.npu.npu_transpose_batchmatmul(
        torch.zeros(2, 4, 24).half().npu(),
        torch.zeros(4, 24, 32).half().npu(),
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
    )
    return ACCEPTED


# Each case consists of its name, the subject of the question, the call, and a part of the
# emulator's error text.
_EXCLUDED: tuple[tuple[str, str, Callable[[Bench], str], str], ...] = (
    (
        "gating_2049",
        "npu_moe_gating_top_k with 2049 experts",
        partial(_gating, experts=2049),
        "experts, at most 2048",
    ),
    (
        "gating_groups_of_2",
        "npu_moe_gating_top_k with groups of two experts",
        partial(_gating, experts=8, groups=4),
        "more than 2 are needed",
    ),
    (
        "one_group_as_count",
        "a group list with one count",
        _one_group_as_count,
        "must not have one entry",
    ),
    (
        "weights_of_another_type",
        "a sum of float16 rows by float32 weights",
        _weights_of_another_type,
        "scales must be",
    ),
    (
        "rotation_898",
        "npu_rotary_mul of 898 elements",
        partial(_rotation, width=898, angles=898),
        "D must be even and at most 896",
    ),
    (
        "rotation_of_a_half",
        "npu_rotary_mul of half of a head",
        partial(_rotation, width=128, angles=64),
        "cos must be as wide as x",
    ),
    (
        "rotation_of_pairs_32",
        "npu_interleave_rope of 32 elements",
        _rotation_of_pairs,
        "D must be 64",
    ),
    (
        "quantise_float32",
        "npu_dynamic_quant of float32",
        _quantise_float32,
        "x must be float16 or bfloat16",
    ),
    ("quantised_65536", "an int8 product over 65536", _quantised_product, "may be 65535"),
    (
        "latent_256",
        "a latent of 256 elements",
        partial(_latent_write, latent=256),
        "kv must be 512 + 64 wide",
    ),
    (
        "latent_cache_of_1",
        "a latent cache with fewer blocks than tokens",
        partial(_latent_write, blocks=1),
        "blocks, B * ceil",
    ),
    (
        "product_of_heads_24",
        "npu_transpose_batchmatmul over 24 elements",
        _product_of_heads,
        "must be multiples of 16",
    ),
    (
        "share_of_12",
        "a merge of shares of 12 elements",
        partial(_shares, count=2, width=12),
        "must be a multiple of 8",
    ),
)

PROBES = (
    Probe(
        "rules.slots_of_float",
        "Are slots of float32 accepted?",
        partial(_write, slots="float32"),
        REFUSED,
    ),
    Probe(
        "rules.cache_of_another_type",
        "Is a cache of another type than the keys accepted?",
        partial(_write, cache="float32"),
        REFUSED,
    ),
    Probe(
        "rules.norm_weight_of_another_type",
        "Is a norm's weight of another type accepted?",
        _norm_weight_of_another_type,
        REFUSED,
        rule="gamma must be",
    ),
    Probe("rules.product_of_int32", "Is a product of int32 accepted?", _product_of_int32, REFUSED),
    Probe(
        "rules.shares_16", "Does a merge accept 16 shares?", partial(_shares, count=16), ACCEPTED
    ),
    Probe(
        "rules.shares_17",
        "Does a merge accept 17 shares?",
        partial(_shares, count=17),
        REFUSED,
        rule="17 shares",
    ),
    *(
        Probe(f"rules.{name}", f"Is {what} accepted?", call, REFUSED, rule=rule)
        for name, what, call, rule in _EXCLUDED
    ),
    Probe(
        "rules.expert_below_zero", "Does routing accept the expert -1?", _expert_below_zero, STOPPED
    ),
)
