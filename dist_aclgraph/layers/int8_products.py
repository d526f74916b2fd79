"""Products in int8. A weight has one scale per output; an input row gets one scale when it is
quantised.

Operators: ``npu_dynamic_quant``, or a fused operator before the product, converts rows to int8
(``int8_rows.py``). Then ``npu_quant_matmul``, or ``npu_grouped_matmul`` for experts, sums integers
and multiplies the sums by the scales of row and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dist_aclgraph.layers.int8_rows import Rows, quantised
from dist_aclgraph.layers.local_experts import multiply_groups


@dataclass(frozen=True)
class Int8Linear:
    """``Linear`` with a weight in int8.

    Attributes:
        weight: [in, out] int8, contiguous.
        scale: [out] float32.
        bias: [out] or None; added after the scales are applied.
    """

    quantises_rows: ClassVar[bool] = True

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """[n, in] -> [n, out]. ``out``, if given, receives the result."""
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
        """Multiply as ``GroupedProduct`` does."""
        return multiply_int8_rows(rows, self.weight, counts, self.scale)


def multiply_int8_rows(
    rows: Rows, weight: Tensor, counts: Tensor, scale: Tensor, **others: Any
) -> Tensor:
    """Multiply as ``multiply_groups`` does. Each row, even a row without an expert, is quantised
    with a separate scale.

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
