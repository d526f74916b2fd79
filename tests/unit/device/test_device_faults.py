"""The cause that stopped a device is read from the message of torch_npu's error."""

from __future__ import annotations

import pytest

from dist_aclgraph.device.failures import device_fault
from dist_aclgraph.errors import DeviceFault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("NPU function error: HCCS LINK ERROR, error code is 507056\n[ERROR] ERR00100", "link"),
        ("NPU function error: FORCE STOP, error code is 107022", "stopped"),
        ("FORCE STOP.\n[ERROR] ERR00100 PTA call acl api failed", "stopped"),
        ("NPU function error: aclrtSynchronizeStream, error code is 507015", "operator"),
        ("UB LINK ERROR, error code is 507899. reason=[device network link error]", "link"),
        ("error code is 507899, reason=hbm Multi-bit ECC error", "ecc"),
        ("error code is 507011, reason=[suspect remote error]", "remote"),
        ("NPU function error: x, error code is 507904", "retry"),
        ("error code is 507011", None),
        ("507015 is no code of an error here", None),
        ("the step was not answered", None),
    ],
)
def test_the_reason_has_priority_over_the_code_and_an_unknown_fault_has_no_name(
    text: str, fault: DeviceFault | None
) -> None:
    assert device_fault(RuntimeError(text)) == fault
