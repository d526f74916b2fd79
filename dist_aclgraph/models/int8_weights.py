"""Matrices in int8, with one scale for each output. Either the checkpoint stores them in int8, or
they are quantised while they are loaded.

The scale of an output depends on all of its inputs, not only on the inputs that one rank loads. So
the int8 matrix does not depend on the number of ranks, and each rank has a part of this matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE, OFFSET = "_scale", "_offset"  # suffixes that are appended to the weight's name
LARGEST = 127


@dataclass(frozen=True)
class Matrix:
    """The weight of a product.

    Attributes:
        weight: [in, out]. It is a transposed view of the stored matrix, which has one row for each
            output.
        scale: [1, out] float32, the scales by which an int8 weight must be multiplied; None for a
            weight in floats.
    """

    weight: Tensor
    scale: Tensor | None = None

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> Matrix:
        """Return this matrix with its outputs in another order.

        Args:
            rearrange: changes the order of columns, [n, out] -> [n, out].
        """
        scale = None if self.scale is None else rearrange(self.scale)
        return Matrix(rearrange(self.weight), scale)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 matrix and its scales. For each output, the weight that is farthest
    from zero becomes 127 or -127.

    Args:
        weight: [out, in] float32. It must contain all inputs of the whole matrix.

    Returns:
        [out, in] int8 and [out, 1] float32.
    """
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    # if all weights of an output are zero, the scale of this output is 0
    steps = torch.where(scale > 0, weight / scale, 0.0)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a matrix by the scales of its outputs. The shapes must allow broadcasting."""
    return (weight.float() * scale).to(dtype)
