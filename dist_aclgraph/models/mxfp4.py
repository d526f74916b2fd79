"""Experts in MXFP4, as gpt-oss is published: two values of four bits in a byte, and one power of
two for each 32 values (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

# endings of the names of the tensors with values and with powers
BLOCKS, SCALES = "_blocks", "_scales"
STORED = ("U8",)  # the type of values and powers, in safetensors' words
GROUP = 32  # number of values that share a power
_BIAS = 127  # A stored power is the exponent plus this number.
# The value of each code of E2M1: one sign bit, two bits of the exponent, one bit of the mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
# The two values of each byte, [256, 2]; the lower half is the first value.
_PAIRS = [(_VALUES[byte & 0xF], _VALUES[byte >> 4]) for byte in range(256)]


def dequantise(blocks: Tensor, powers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [rows, groups * 32] values.

    Args:
        blocks: [rows, groups, 16] uint8.
        powers: [rows, groups] uint8.
    """
    # bfloat16 is exact here: a value has two significant bits, and the range of powers is the same.
    pairs = torch.tensor(_PAIRS, dtype=torch.bfloat16)
    values = pairs.index_select(0, blocks.flatten().int()).view(*powers.shape, GROUP)
    factors = torch.pow(2.0, powers.float() - _BIAS).bfloat16()
    return values.mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)
