"""Finds the cause of a device error. Only this module reads CANN's codes and messages.

Sources: CANN's ``rt_error_codes.h`` and the messages of its runtime and HDK. When a resource is
exhausted, CANN's message depends on CANN's version and on the call that failed.
"""

from __future__ import annotations

import re

from dist_aclgraph.errors import (
    CaptureError,
    DeviceError,
    DeviceFault,
    DistAclGraphError,
    FailureCause,
    OutOfDeviceMemoryError,
    StreamExhaustedError,
    WorkerLostError,
    WorkerStartTimeoutError,
)

# CANN's codes of exhausted resources. 207008 is ACL_ERROR_RT_NO_STREAM_RESOURCE; a capture that
# cannot begin has this code. 207005 is ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, with the text "new capture
# stream failed". 207001 is ACL_ERROR_RT_MEMORY_ALLOCATION.
_STREAM_WORDS = re.compile(
    r"\b(207008|207005)\b|stream resource|sq cq|capture stream failed|"
    r"insufficient_stream_resources",
    re.IGNORECASE,
)
_MEMORY_WORDS = re.compile(r"\b207001\b|out of (device )?memory", re.IGNORECASE)
_TIMEOUT_WORDS = re.compile(r"\b(507046|107020)\b|time(d)? ?out", re.IGNORECASE)

# A code of ACL, or a reason in CANN's text, says why a device stopped. torch_npu's NPUException.h
# lists the codes and the reasons. In torch_npu's messages, the code follows the words "error code
# is".
_CODE = re.compile(r"error code is (\d+)")
_REASON = re.compile(r"reason=\[?([\w -]+)")
_FAULT_OF_CODE: dict[int, DeviceFault] = {
    107022: "stopped",  # ACL_ERROR_RT_DEVICE_TASK_ABORT
    507015: "operator",  # ACL_ERROR_RT_AICORE_EXCEPTION
    507018: "operator",  # ACL_ERROR_RT_AICPU_EXCEPTION
    507035: "operator",  # ACL_ERROR_RT_VECTOR_CORE_EXCEPTION
    507053: "uce",  # ACL_ERROR_RT_DEVICE_MEM_ERROR
    507054: "ecc",  # ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR
    507055: "suspect",  # ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR
    507056: "link",  # ACL_ERROR_RT_LINK_ERROR
    507057: "remote",  # ACL_ERROR_RT_SUSPECT_REMOTE_ERROR
    507904: "retry",  # ACL_ERROR_RT_COMM_OP_RETRY_FAIL
}
_FAULT_OF_REASON: dict[str, DeviceFault] = {
    "device task abort": "stopped",
    "device mem error": "uce",
    "hbm multi-bit ecc error": "ecc",
    "suspect device mem error": "suspect",
    "link error": "link",
    "device network link error": "link",
    "suspect remote error": "remote",
    "hccl op retry failed": "retry",
}
_STOPPED = "FORCE STOP"  # text in errors of torch_npu's task queue, which contain no code


def device_fault(error: BaseException) -> DeviceFault | None:
    """Return why the device stopped. Return None if the error names no cause, or if the device did
    not stop.

    If CANN's text contains both a reason and a code, the code is ignored: the code may describe the
    failed call, and not the cause.
    """
    text = str(error)
    for reason in _REASON.findall(text):
        if fault := _FAULT_OF_REASON.get(reason.strip().lower()):
            return fault
    for code in _CODE.findall(text):
        if fault := fault_of_code(int(code)):
            return fault
    return "stopped" if _STOPPED in text else None


def fault_of_code(code: int) -> DeviceFault | None:
    """Return why the device stopped, according to an error code of CANN's runtime; None if the code
    does not mean that the device stopped.
    """
    return _FAULT_OF_CODE.get(code)


def classify(error: BaseException) -> FailureCause:
    """Return the cause of an error. For errors of this package, the type determines the cause. For
    torch_npu's errors, CANN's codes and words in the message determine the cause.
    """
    if isinstance(error, StreamExhaustedError):
        return "streams"
    if isinstance(error, OutOfDeviceMemoryError):
        return "memory"
    if isinstance(error, TimeoutError | WorkerLostError | WorkerStartTimeoutError):
        return "timeout"
    text = str(error)
    if _STREAM_WORDS.search(text):
        return "streams"
    if _MEMORY_WORDS.search(text) or "OutOfMemory" in type(error).__name__:
        return "memory"
    if _TIMEOUT_WORDS.search(text):
        return "timeout"
    return "operator"


def device_error(error: BaseException, doing: str) -> DistAclGraphError:
    """Convert an exception of torch_npu to an error of this package. The caller raises the result
    with ``raise ... from error``.
    """
    if isinstance(error, DistAclGraphError):
        return error
    kinds: dict[FailureCause, type[DistAclGraphError]] = {
        "streams": StreamExhaustedError,
        "memory": OutOfDeviceMemoryError,
        "operator": CaptureError if "captur" in doing else DeviceError,
        "timeout": DeviceError,
    }
    return kinds[classify(error)](f"{doing}: {first_lines(error)}")


def first_lines(error: BaseException, limit: int = 600) -> str:
    """Return the message without the details that torch_npu appends (time, pid, C++ frames)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("[ERROR]", "Exception raised from"))]
    return " ".join(kept or lines)[:limit] or type(error).__name__
