"""Sends several arrays of integers to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.arrays.packing import pack_parts
from dist_aclgraph.device.npu import Npu


def upload_arrays(npu: Npu, arrays: Sequence[IntArray]) -> list[Tensor]:
    """Send all arrays in one copy. Return one tensor for each array; each tensor begins at an
    aligned address.
    """
    parts, size = pack_parts(array.size for array in arrays)
    packed = np.zeros(size, np.int32)
    for part, array in zip(parts, arrays, strict=True):
        packed[part] = array.ravel()
    flat = npu.upload(packed)
    return [flat[part].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
