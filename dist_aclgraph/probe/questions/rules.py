"""Rules of other operators: calls that the documents exclude. All tensors contain zeros."""

from __future__ import annotations

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


def _shares(bench: Bench, count: int) -> str:
    torch = bench.torch
    sums = [torch.zeros(4).npu() for _ in range(count)]
    outs = [torch.zeros(4, 64).npu() for _ in range(count)]
    bench.ops.npu_attention_update(sums, outs, 0)
    return ACCEPTED


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
    Probe(
        "rules.expert_below_zero", "Does routing accept the expert -1?", _expert_below_zero, STOPPED
    ),
)
