"""Experts in MXFP4, the format of gpt-oss: two values of four bits in each byte, and one power of
two for every 32 values (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

# endings of the names of tensors: values, powers
BLOCKS, SCALES = "_blocks", "_scales"
STORED = ("U8",)  # the type in which safetensors files store values and powers
GROUP = 32  # number of values that share a power
_BIAS = 127  # A stored power is the exponent of two plus this number.
# The magnitude for each code of E2M1. A code has a sign bit, two exponent bits and a mantissa bit.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
# [256, 2], the two values that each byte contains. The lower half of the byte is the first value.
_PAIRS = [(_VALUES[byte & 0xF], _VALUES[byte >> 4]) for byte in range(256)]


def dequantise(blocks: Tensor, powers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values as floats of type ``dtype``: [rows, groups * 32].

    Args:
        blocks: [rows, groups, 16] uint8.
        powers: [rows, groups] uint8.
    """
    # bfloat16 can represent all products of values and powers. A value has two significant bits,
    # and the range of powers is the range of bfloat16.
    pairs = torch.tensor(_PAIRS, dtype=torch.bfloat16)
    values = pairs.index_select(0, blocks.flatten().int()).view(*powers.shape, GROUP)
    factors = torch.pow(2.0, powers.float() - _BIAS).bfloat16()
    return values.mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)
