"""Compares products on the device with products on the host. The weights have four bits. The hidden
size and the groups are those of Kimi K2.
"""

from __future__ import annotations

from typing import Any

from dist_aclgraph.probe.question import EQUAL, Answer, Bench, Probe
from dist_aclgraph.probe.questions.operators import BFLOAT16

HIDDEN, OUT, ROWS = 7168, 256, 16
# Numbers of inputs that share a scale: GROUP for bfloat16 rows, INT8_GROUP for int8 rows.
GROUP, INT8_GROUP = 32, 256
SIZES = [3, 0, 9, 4]  # number of rows of each expert


def _values(bench: Bench, *shape: int) -> Any:
    return bench.torch.randint(-8, 8, shape, dtype=bench.torch.int8)


def _packed(values: Any) -> Any:
    """Pack eight consecutive outputs into an int32, like ``npu_convert_weight_to_int4pack``."""
    low, high = values[..., ::2], values[..., 1::2]
    return ((low & 15) | (high << 4)).contiguous().view(values.new_empty(0).int().dtype)


def _scaled(values: Any, scales: Any) -> Any:
    """Multiply values [.., in, out] by scales [.., groups, out]. The inputs of a group share a
    scale.
    """
    return values.float() * scales.float().repeat_interleave(
        values.shape[-2] // scales.shape[-2], -2
    )


def _bits(scales: Any) -> Any:
    return scales.float().view(scales.new_empty(0).int().dtype).long()


def _grouped(bench: Bench, x: Any, values: Any, **scales: Any) -> Any:
    return bench.torch.ops.npu.npu_grouped_matmul(
        [x.npu()],
        [_packed(values).npu()],
        group_list=bench.torch.tensor(SIZES).npu(),
        group_list_type=1,
        group_type=0,
        split_item=3,
        output_dtype=bench.torch.bfloat16,
        **{name: [tensor.npu()] for name, tensor in scales.items()},
    )[0]


def _by_expert(bench: Bench, x: Any, weights: Any) -> Any:
    parts = zip(x.float().split(SIZES), weights, strict=True)
    return bench.torch.cat([part @ weight for part, weight in parts])


def _floats(bench: Bench) -> Answer:
    torch = bench.torch
    x, values = torch.randn(ROWS, HIDDEN).bfloat16(), _values(bench, HIDDEN, OUT)
    scales = (torch.rand(HIDDEN // GROUP, OUT) * 1e-3).bfloat16()
    got = torch.ops.npu.npu_weight_quant_batchmatmul(
        x.npu(), _packed(values).npu(), scales.npu(), antiquant_group_size=GROUP
    )
    return bench.compare(got, x.float() @ _scaled(values, scales).bfloat16().float(), BFLOAT16)


def _floats_of_experts(bench: Bench) -> Answer:
    torch = bench.torch
    x, values = torch.randn(ROWS, HIDDEN).bfloat16(), _values(bench, len(SIZES), HIDDEN, OUT)
    scales = (torch.rand(len(SIZES), HIDDEN // GROUP, OUT) * 1e-3).bfloat16()
    got = _grouped(
        bench, x, values, antiquant_scale=scales, antiquant_offset=torch.zeros_like(scales)
    )
    weights = _scaled(values, scales).bfloat16().float()
    return bench.compare(got, _by_expert(bench, x, weights), BFLOAT16)


def _int8(bench: Bench) -> Answer:
    torch = bench.torch
    x = torch.randint(-127, 128, (ROWS, HIDDEN), dtype=torch.int8)
    values, rows = _values(bench, HIDDEN, OUT), torch.rand(ROWS, 1) * 1e-3
    scales = torch.rand(HIDDEN // INT8_GROUP, OUT) * 1e-3
    weights = _scaled(values, scales)
    got = torch.ops.npu.npu_quant_matmul(
        x.npu(),
        _packed(values).npu(),
        _bits(scales).npu(),
        offset=(8 * weights.sum(0)).npu(),
        pertoken_scale=rows.npu(),
        output_dtype=torch.bfloat16,
        group_sizes=[0, 0, INT8_GROUP],
    )
    return bench.compare(got, (x.float() @ weights) * rows, BFLOAT16)


def _int8_of_experts(bench: Bench) -> Answer:
    torch = bench.torch
    x = torch.randint(-127, 128, (ROWS, HIDDEN), dtype=torch.int8)
    values, rows = _values(bench, len(SIZES), HIDDEN, OUT), torch.rand(ROWS) * 1e-3
    scales = torch.rand(len(SIZES), 1, OUT) * 1e-3
    weights = _scaled(values, scales)
    got = _grouped(
        bench, x, values, bias=8 * weights.sum(1), scale=_bits(scales), per_token_scale=rows
    )
    return bench.compare(got, _by_expert(bench, x, weights) * rows[:, None], BFLOAT16)


PROBES = (
    Probe(
        "int4.floats",
        "Is npu_weight_quant_batchmatmul of bfloat16 and int4 as on the host (Kimi K2)?",
        _floats,
        EQUAL,
    ),
    Probe(
        "int4.floats_of_experts",
        "Is npu_grouped_matmul of bfloat16 and int4 as on the host (Kimi K2)?",
        _floats_of_experts,
        EQUAL,
    ),
    Probe(
        "int4.int8",
        "Is npu_quant_matmul of int8 and int4, in groups of 256 inputs, as on the host?",
        _int8,
        EQUAL,
    ),
    Probe(
        "int4.int8_of_experts",
        "Is npu_grouped_matmul of int8 and int4 as on the host?",
        _int8_of_experts,
        EQUAL,
    ),
)
