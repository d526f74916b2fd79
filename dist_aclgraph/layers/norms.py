"""RMS norms, alone and after the addition of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RmsNorm:
    """Divides rows by the root of their mean square, and multiplies them by a weight.

    Attributes:
        weight: [width].
        adds_one: whether the factor is ``1 + weight``. The operator adds the one in float32; in
            bfloat16, the sum would lose the bits of small weights.
    """

    weight: Tensor
    eps: float
    adds_one: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        npu = torch.ops.npu
        if self.adds_one:
            normed: Tensor = npu.npu_gemma_rms_norm(x.contiguous(), self.weight, self.eps)[0]
        else:
            normed = npu.npu_rms_norm(x, self.weight, self.eps)[0]
        return normed

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and this sum."""
        if self.adds_one:  # There is no such operator with an addition.
            total = x + residual
            return self(total), total
        npu = torch.ops.npu
        normed, _, total = npu.npu_add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total
