"""Weights in FP8 with one scale for each block, as DeepSeek publishes them."""

from __future__ import annotations

import torch
from torch import Tensor

# Ending of the names of scales. Although "inv" means "inverse", weights are multiplied by these
# scales, not divided by them.
SUFFIX = "_scale_inv"
BLOCK = (128, 128)


def scales_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Return the shape of a weight's scales. Blocks at the edges of the weight can be smaller than
    ``block``.
    """
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


def dequantise(
    part: Tensor,
    scales: Tensor,
    first: tuple[int, int],
    dtype: torch.dtype,
    block: tuple[int, int] = BLOCK,
) -> Tensor:
    """Multiply a part of a weight by the scales of its blocks.

    Args:
        part: [rows, columns] in FP8.
        scales: [ceil(all rows / 128), ceil(all columns / 128)] float32.
        first: row and column of the weight at which the part begins.
    """
    rows, columns = (
        (start + torch.arange(length)) // size
        for start, length, size in zip(first, part.shape, block, strict=True)
    )
    return (part.float() * scales[rows][:, columns]).to(dtype)
