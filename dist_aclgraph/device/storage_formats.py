"""Storage formats: how the elements of a tensor are ordered in the device's memory.

ND is the order that torch assumes. FRACTAL_NZ divides each matrix into blocks of 16 rows and 32
bytes of columns, which the cube unit reads without rearranging them. Sizes and strides of a tensor
do not depend on its format. Only operators whose documentation lists FRACTAL_NZ accept a tensor in
this format.
"""

from __future__ import annotations

from torch import Tensor

from dist_aclgraph.device.npu import runtime, torch_npu, translated
from dist_aclgraph.errors import DeviceError

FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ
NZ_ROWS = 16  # number of rows of a block


def to_fractal_nz(weight: Tensor) -> Tensor:
    """Return a copy of the matrices in FRACTAL_NZ. Each matrix is padded with zeros to full blocks.

    Do not call this during a capture. Before CANN 9.1, CANN's graph engine makes the copy. The
    engine's work cannot be captured.

    Args:
        weight: [..., rows, columns], contiguous.

    Raises:
        DeviceError: CANN or torch_npu cannot make the copy.
    """
    # Without this option, torch_npu leaves the tensor in the format ND. The option is set only
    # during this call, because the option also lets some operators choose the formats of their
    # results.
    config = runtime().config
    config.allow_internal_format = True
    try:
        with translated("changing the storage format of weights"):
            copy: Tensor = torch_npu().npu_format_cast(weight, FRACTAL_NZ)
    finally:
        config.allow_internal_format = False
    if (found := int(torch_npu().get_npu_format(copy))) != FRACTAL_NZ:
        raise DeviceError(
            f"torch_npu made weights in storage format {found} instead of {FRACTAL_NZ}: leave "
            "expert_swiglu_quant and nz_weights out of device.fusions"
        )
    return copy
