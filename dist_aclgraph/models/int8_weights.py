"""Matrices in int8 with one scale for each output: as checkpoints hold them, or made while loading.

A scale belongs to all inputs of an output, not only to those that a rank holds. So the ranks hold
parts of the same matrix, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE, OFFSET = "_scale", "_offset"  # of their names, behind the weight's
LARGEST = 127


@dataclass(frozen=True)
class Matrix:
    """The weight of a product.

    Attributes:
        weight: [in, out]; a view of what is stored, which has a row for each output.
        scale: [1, out] float32, by which an int8 weight is multiplied; None for floats.
    """

    weight: Tensor
    scale: Tensor | None = None

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> Matrix:
        """Let ``rearrange`` move outputs: [n, out] -> [n, out]."""
        scale = None if self.scale is None else rearrange(self.scale)
        return Matrix(rearrange(self.weight), scale)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 matrix and its scales: the largest weight of each output is 127.

    Args:
        weight: [out, in] float32, with all inputs.

    Returns:
        [out, in] int8 and [out, 1] float32.
    """
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    # An output of zeros has the scale 0.
    steps = torch.where(scale > 0, weight / scale, 0.0)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a matrix, either way round, by the scales of its outputs."""
    return (weight.float() * scale).to(dtype)
