"""Norms of rows. A norm is applied to the rows alone, or to their sum with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


@dataclass(frozen=True)
class RmsNorm:
    """Divides rows by the root of their mean square, and multiplies them by a weight.

    Attributes:
        weight: [width].
        adds_one: whether the rows are multiplied by ``1 + weight``. If false, they are multiplied
            by ``weight``. The sum is computed in float32, because bfloat16 would round off the low
            bits of a small weight.
    """

    weight: Tensor
    eps: float
    adds_one: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows, with the same shape: [..., width]."""
        npu = torch.ops.npu
        norm = npu.npu_gemma_rms_norm if self.adds_one else npu.npu_rms_norm
        # npu_gemma_rms_norm accepts only contiguous rows. Rows of heads are not contiguous, because
        # they are parts of wider rows.
        normed: Tensor = norm(x.contiguous() if self.adds_one else x, self.weight, self.eps)[0]
        return normed

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and the sum itself."""
        if self.adds_one:
            residual = x + residual
            return self(residual), residual
        npu = torch.ops.npu
        normed, _, residual = npu.npu_add_rms_norm(x, residual, self.weight, self.eps)
        return normed, residual


@dataclass(frozen=True)
class CenteredNorm:
    """A layer norm: subtracts the mean of a row, and then works like ``RmsNorm``.

    Attributes:
        weight: [width].
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows, with the same shape: [..., width]."""
        return layer_norm(x, self.weight.shape, self.weight, eps=self.eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and the sum itself."""
        residual = x + residual
        return self(residual), residual


@dataclass(frozen=True)
class NoNorm:
    """Replaces a norm, and returns rows without normalising them. Layers that normalise only the
    results of attention and of the feed-forward part have this object in place of the norms of the
    inputs.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` as it is."""
        return x

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x + residual`` twice."""
        residual = x + residual
        return residual, residual


Norm = RmsNorm | CenteredNorm
