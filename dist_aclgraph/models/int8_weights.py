"""Matrices in int8 with one scale per output. Either the checkpoint stores the matrices in int8, or
matrices are quantised while they are loaded.

A scale depends on all inputs of an output, not only on the inputs that one rank loads. So for any
number of ranks, the ranks have parts of the same int8 matrix.
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
        weight: [in, out]; a transposed view, because one row is stored for each output.
        scale: [1, out] float32, factor of an int8 weight; None for floats.
    """

    weight: Tensor
    scale: Tensor | None = None

    def rearranged(self, rearrange: Callable[[Tensor], Tensor]) -> Matrix:
        """Return the matrix with its outputs in another order.

        Args:
            rearrange: changes the order of columns, [n, out] -> [n, out].
        """
        scale = None if self.scale is None else rearrange(self.scale)
        return Matrix(rearrange(self.weight), scale)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 matrix and its scales. The largest weight of each output becomes 127.

    Args:
        weight: [out, in] float32; must contain all inputs of the whole matrix.

    Returns:
        [out, in] int8 and [out, 1] float32.
    """
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    # If all weights of an output are zero, its scale is 0.
    steps = torch.where(scale > 0, weight / scale, 0.0)
    return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a matrix by the scales of its outputs; shapes must broadcast."""
    return (weight.float() * scale).to(dtype)
