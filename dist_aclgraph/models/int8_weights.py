"""Matrices in int8 with one scale for each output: as checkpoints hold them, or made while loading.

A scale belongs to all inputs of an output, whichever of them a rank holds, so that ranks have parts
of the same matrix however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def beside(matrices: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Return one matrix with the outputs of all, as ``alike`` has them."""
    weights, scales = of_one_kind(matrices, dtype)
    # Rows of what is stored lie one behind another: they are moved as they are.
    rows = torch.cat([weight.t() for weight in weights])
    return Matrix(rows.t(), torch.cat(scales, 1) if scales else None)


def of_one_kind(
    matrices: Sequence[Matrix], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and scales for one operator: int8 if all are, else all floats, no scales.

    What a checkpoint leaves in floats is meant to stay so, also beside matrices in int8.
    """
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if len(scales) == len(matrices):
        return [matrix.weight for matrix in matrices], scales
    return [
        m.weight if m.scale is None else dequantise(m.weight, m.scale, dtype) for m in matrices
    ], []
