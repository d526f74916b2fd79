"""Rows in int8 with one scale each, and the operators that compute them.

``npu_dynamic_quant`` converts rows to int8. The element of a row that is farthest from zero becomes
127 or -127. A fused operator (``models/fusions.py``) computes rows and converts them in one launch.
These rows are the unrounded results of a norm or of SwiGLU, or the rows that ``LocalExperts`` sorts
by experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.norm import RmsNorm


@dataclass(frozen=True)
class Int8Rows:
    """Rows that only int8 products use.

    Attributes:
        values: [n, width] int8.
        scales: [n] float32.
        dtype: type that the rows would have without quantisation; products return this type.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


Rows = Tensor | Int8Rows


def quantised(rows: Rows) -> Int8Rows:
    """Return rows in int8; rows that are in int8 already do not change."""
    if isinstance(rows, Int8Rows):
        return rows
    values, scales = torch.ops.npu.npu_dynamic_quant(rows)
    return Int8Rows(values, scales, rows.dtype)


def in_floats(rows: Rows) -> Tensor:
    """Return the rows, which are never in int8: callers send int8 rows only to int8 products."""
    assert not isinstance(rows, Int8Rows)
    return rows


@dataclass(frozen=True)
class Int8Norm:
    """A norm of a sum, with results in int8, which only int8 products use. torch_npu has no
    operator that only normalises and quantises.
    """

    norm: RmsNorm

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Int8Rows, Tensor]:
        """Return the norm of ``x + residual``, and the sum itself."""
        values, _, residual, scales, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
            x, residual, self.norm.weight, epsilon=self.norm.eps, output_mask=[True, False]
        )
        return Int8Rows(values, scales, x.dtype), residual


def swiglu_to_int8(gate_up: Tensor) -> Int8Rows:
    """Return ``silu(gate) * up``: [n, 2 * width] -> [n, width]; the gate is the first half."""
    values, scales = torch.ops.npu.npu_dequant_swiglu_quant(
        gate_up, activate_left=True, quant_mode=1
    )
    return Int8Rows(values, scales, gate_up.dtype)
