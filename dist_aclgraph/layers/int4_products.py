"""Products with weights of four bits. One int32 contains the weights of eight consecutive outputs.
The weight of the first output is in the lowest bits.

W4A16: ``npu_weight_quant_batchmatmul`` (for experts, ``npu_grouped_matmul``) converts the weights
to the type of the rows, and then multiplies. W4A8: rows are quantised to int8, as in
``int8_products``; then ``npu_quant_matmul`` (for experts, ``npu_grouped_matmul``) multiplies. The
operators of W4A8 subtract 8 from the rows before they multiply. Sums of the weights correct the
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dist_aclgraph.layers.int8_products import multiply_int8_rows
from dist_aclgraph.layers.int8_rows import Rows, in_floats, quantised
from dist_aclgraph.layers.local_experts import multiply_groups
from dist_aclgraph.shapes.int4_formats import INT8_GROUP


@dataclass(frozen=True)
class W4A16Linear:
    """``Linear`` with a weight of four bits.

    Attributes:
        weight: [in, out / 8] int32, contiguous.
        scale: [groups, out], with the type of the rows.
        bias: [out] or None; float32 if the rows are bfloat16, float16 if the rows are float16.
    """

    quantises_rows: ClassVar[bool] = False

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Map [n, in] to [n, out]. If ``out`` is given, the result is written to ``out``."""
        groups = self.scale.shape[0]
        y: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            in_floats(x),
            self.weight,
            self.scale,
            bias=self.bias,
            # 0 means that all inputs have the same scale
            antiquant_group_size=self.weight.shape[0] // groups if groups > 1 else 0,
        )
        return y if out is None else out.copy_(y)


@dataclass(frozen=True)
class W4A16GroupedProduct:
    """``GroupedProduct`` with weights of four bits.

    Attributes:
        weight: [num_local, in, out / 8] int32.
        scale: [num_local, groups, out], with the type of the rows.
        zeros: offsets with the shape and type of ``scale``. All offsets are zero, but the operator
            requires offsets for weights of four bits. All layers can share one tensor of zeros.
    """

    quantises_rows: ClassVar[bool] = False

    weight: Tensor
    scale: Tensor
    zeros: Tensor

    def __call__(self, rows: Rows, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
        return multiply_groups(
            in_floats(rows),
            self.weight,
            counts,
            antiquant_scale=[self.scale],
            antiquant_offset=[self.zeros],
        )


@dataclass(frozen=True)
class W4A8Linear:
    """``Linear`` with a weight of four bits and rows of int8.

    Attributes:
        weight: [in, out / 8] int32, contiguous; the number of inputs is a multiple of 256.
        scale: [in / 256, out] int64; each element contains the bits of a float32.
        sums: [out] float32: 8 times the sum of each output's weights.
        bias: [out] or None; it is added to the operator's result, because the operator accepts no
            bias.
    """

    quantises_rows: ClassVar[bool] = True

    weight: Tensor
    scale: Tensor
    sums: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Map [n, in] to [n, out]. If ``out`` is given, the result is written to ``out``."""
        rows = quantised(x)
        y: Tensor = torch.ops.npu.npu_quant_matmul(
            rows.values,
            self.weight,
            self.scale,
            offset=self.sums,
            pertoken_scale=rows.scales[:, None],
            output_dtype=rows.dtype,
            group_sizes=[0, 0, INT8_GROUP],
        )
        if self.bias is not None:
            y = y + self.bias
        return y if out is None else out.copy_(y)


@dataclass(frozen=True)
class W4A8GroupedProduct:
    """``GroupedProduct`` with weights of four bits and rows of int8.

    Attributes:
        weight: [num_local, in, out / 8] int32; the number of inputs is a multiple of 64.
        scale: [num_local, 1 or in / 256, out] int64; each element contains the bits of a float32.
        sums: [num_local, out] float32: 8 times the sum of each output's weights.
    """

    quantises_rows: ClassVar[bool] = True

    weight: Tensor
    scale: Tensor
    sums: Tensor

    def __call__(self, rows: Rows, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
        return multiply_int8_rows(rows, self.weight, counts, self.scale, bias=[self.sums])
