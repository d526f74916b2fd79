"""Products in int8. A weight has one scale for each output. An input row gets one scale when it is
quantised.

Operators: ``npu_dynamic_quant``, or a fused operator before the product, converts rows to int8
(``int8_rows.py``). Then ``npu_quant_matmul`` (for experts, ``npu_grouped_matmul``) adds up products
of integers, and multiplies each sum by the scale of its row and the scale of its output. The
results do not depend on the storage format of the weights, ND or FRACTAL_NZ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dist_aclgraph.device.storage_formats import NZ_ROWS, to_fractal_nz
from dist_aclgraph.layers.int8_rows import Int8Rows, Rows, quantised
from dist_aclgraph.layers.local_experts import list_type, multiply_groups


def fills_blocks(weight: Tensor) -> bool:
    """Return whether int8 matrices, [..., in, out], can be stored in FRACTAL_NZ without padding in
    the dimension ``in``.
    """
    return weight.shape[-2] % NZ_ROWS == 0


def in_blocks(weight: Tensor) -> Tensor:
    """Return int8 matrices, [..., in, out], in FRACTAL_NZ. If they are in ND, the result is a copy.

    Raises:
        DeviceError: the device cannot change the storage format.
    """
    return to_fractal_nz(weight)


@dataclass(frozen=True)
class Int8Linear:
    """``Linear`` with a weight in int8.

    Attributes:
        weight: [in, out] int8, contiguous.
        scale: [out] float32.
        bias: [out] or None; added after the multiplication by the scales.
    """

    quantises_rows: ClassVar[bool] = True

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Map [n, in] to [n, out]. If ``out`` is given, the result is written to ``out``."""
        rows = quantised(x)
        y: Tensor = torch.ops.npu.npu_quant_matmul(
            rows.values,
            self.weight,
            self.scale,
            pertoken_scale=rows.scales,
            bias=self.bias,
            output_dtype=rows.dtype,
        )
        return y if out is None else out.copy_(y)


@dataclass(frozen=True)
class Int8GroupedProduct:
    """``GroupedProduct`` with weights in int8.

    Attributes:
        weight: [num_local, in, out] int8.
        scale: [num_local, out]. The operator requires bfloat16 if rows are bfloat16, and float32 if
            rows are float16.
    """

    quantises_rows: ClassVar[bool] = True

    weight: Tensor
    scale: Tensor

    def __call__(self, rows: Rows, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
        return multiply_int8_rows(rows, self.weight, counts, self.scale)


@dataclass(frozen=True)
class Int8SwigluProduct:
    """An ``InnerProduct`` that runs as one operator. The operator multiplies by the weights of gate
    and up, computes SwiGLU, and converts the results to int8. The intermediate results are not
    rounded to the type of activations.

    Attributes:
        weight: [num_local, hidden, 2 * width] int8, in FRACTAL_NZ; gate comes first, then up.
        scale: [num_local, 2 * width] float32, bfloat16 or float16.
    """

    weight: Tensor
    scale: Tensor

    @classmethod
    def replacing(cls, product: Int8GroupedProduct) -> Int8SwigluProduct:
        """Return an object that replaces ``product``, with copies of its weights.

        Raises:
            DeviceError: the device cannot change the storage format.
        """
        return cls(in_blocks(product.weight), product.scale)

    def __call__(self, rows: Rows, counts: Tensor) -> Int8Rows:
        """Map [rows, hidden] to the activated values, [rows, width]."""
        rows = quantised(rows)
        values, scales = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            rows.values,
            [self.weight],
            [self.scale],
            rows.scales,
            counts,
            group_list_type=list_type(counts),
        )
        return Int8Rows(values, scales, rows.dtype)


def multiply_int8_rows(
    rows: Rows, weight: Tensor, counts: Tensor, scale: Tensor, **others: Any
) -> Tensor:
    """Multiply each group's rows with the group's weight in int8; see ``multiply_groups``. Each row
    is quantised with its own scale, even a row that belongs to no expert.

    Args:
        scale: the scales of the weights.
    """
    rows = quantised(rows)
    return multiply_groups(
        rows.values,
        weight,
        counts,
        scale=[scale],
        per_token_scale=[rows.scales],
        output_dtype=rows.dtype,
        **others,
    )
