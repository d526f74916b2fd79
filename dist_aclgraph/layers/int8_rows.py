"""Rows in int8, with one scale for each row, and the operators that compute such rows.

``npu_dynamic_quant`` converts rows to int8. In each row, the element that is farthest from zero
becomes 127 or -127. A fused operator (``models/fusions.py``) computes rows and converts them to
int8 in one launch. Some fused operators compute a norm or SwiGLU. They do not round the results to
the type of activations before the conversion. Another fused operator sorts rows by expert for
``LocalExperts``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.norm import RmsNorm


@dataclass(frozen=True)
class Int8Rows:
    """Rows in int8. Only int8 products can use them.

    Attributes:
        values: [n, width] int8.
        scales: [n] float32.
        dtype: type that the rows would have without quantisation. Products that multiply these rows
            return this type.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


Rows = Tensor | Int8Rows


def quantised(rows: Rows) -> Int8Rows:
    """Return ``rows`` in int8. Rows that are already in int8 are returned unchanged."""
    if isinstance(rows, Int8Rows):
        return rows
    values, scales = torch.ops.npu.npu_dynamic_quant(rows)
    return Int8Rows(values, scales, rows.dtype)


def in_floats(rows: Rows) -> Tensor:
    """Return ``rows``, which must not be in int8. Callers pass int8 rows only to int8 products."""
    assert not isinstance(rows, Int8Rows)
    return rows


@dataclass(frozen=True)
class Int8Norm:
    """Adds the residual stream, normalises the sum, and returns the result in int8, for int8
    products. torch_npu has no operator that normalises and quantises without this addition.
    """

    norm: RmsNorm

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Int8Rows, Tensor]:
        """Return the norm of ``x + residual``, and the sum itself."""
        values, _, residual, scales, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
            x, residual, self.norm.weight, epsilon=self.norm.eps, output_mask=[True, False]
        )
        return Int8Rows(values, scales, x.dtype), residual


def swiglu_to_int8(gate_up: Tensor) -> Int8Rows:
    """Return ``silu(gate) * up`` in int8: [n, 2 * width] -> [n, width]. The first half of a row is
    the gate.
    """
    values, scales = torch.ops.npu.npu_dequant_swiglu_quant(
        gate_up, activate_left=True, quant_mode=1
    )
    return Int8Rows(values, scales, gate_up.dtype)
