"""Products in int8: weights have one scale per output; each input row gets a scale when it is
quantised.

Operators: ``npu_dynamic_quant`` (rows to int8: the largest element of each becomes 127), then
``npu_quant_matmul``, or ``npu_grouped_matmul`` for experts. They sum integers, then multiply by
both scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.local_experts import multiply_groups


@dataclass(frozen=True)
class Int8Linear:
    """``Linear`` with a weight in int8.

    Attributes:
        weight: [in, out] int8, contiguous.
        scale: [out] float32.
        bias: [out] or None; added last.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, in] -> [n, out], written to ``out`` if given."""
        npu = torch.ops.npu
        rows, row_scale = npu.npu_dynamic_quant(x)
        y: Tensor = npu.npu_quant_matmul(
            rows,
            self.weight,
            self.scale,
            pertoken_scale=row_scale,
            bias=self.bias,
            output_dtype=x.dtype,
        )
        return y if out is None else out.copy_(y)


@dataclass(frozen=True)
class Int8GroupedProduct:
    """``GroupedProduct`` with weights in int8.

    Attributes:
        weight: [num_local, in, out] int8.
        scale: [num_local, out]; bfloat16 with bfloat16 rows, float32 with float16 rows, as the
            operator requires.
    """

    weight: Tensor
    scale: Tensor

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """See ``GroupedProduct``. Rows without an expert are quantised, too; each row has its own
        scale.
        """
        quantised, row_scale = torch.ops.npu.npu_dynamic_quant(rows)
        return multiply_groups(
            quantised,
            self.weight,
            counts,
            scale=[self.scale],
            per_token_scale=[row_scale],
            output_dtype=rows.dtype,
        )
