"""Reads the properties of an NPU of this machine in a short-lived child process. Only the child
process opens the device: planning processes and Ray's driver process open no device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from dist_aclgraph.config import Config
from dist_aclgraph.environment import python_environment
from dist_aclgraph.errors import DeviceError, DistAclGraphError

ASK_S = 90.0  # time limit for importing torch_npu and opening a device
FIRST = "the first NPU of this machine"


@dataclass(frozen=True)
class NpuFacts:
    """One NPU, as its runtime describes it.

    Attributes:
        soc: name of the chip.
        cann: version of CANN, e.g. 9.1.0; "" if CANN does not report it.
        memory_mb: the total memory of the device. The free memory is not used: while a plan is
            made, other programs may use the device.
    """

    soc: str
    cann: str
    memory_mb: int


def ask_npu(config: Config, timeout_s: float = ASK_S) -> NpuFacts:
    """Read the properties of the first NPU that this process may use.

    Raises:
        DeviceError: the NPU cannot be opened, or does not answer in time.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(config),
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # This process does not wait until the child has exited, because a child that hangs in the
        # driver never exits.
        raise DeviceError(
            f"{FIRST} has not answered for {timeout_s:g} s: look at it with `npu-smi info`"
        ) from None
    finally:
        child.kill()
    return _facts_of(output, errors, child.returncode)


def _facts_of(output: str, errors: str, code: int) -> NpuFacts:
    """Return the value in the last line of a child's output. Earlier lines may be messages of
    libraries.
    """
    try:
        answer = json.loads(output.splitlines()[-1])
        if "error" not in answer:
            return NpuFacts(**answer)
        problem = str(answer["error"])
    except (IndexError, TypeError, ValueError):
        problem = (errors.strip().splitlines() or [f"the process ended with {code}"])[-1]
    raise DeviceError(f"{FIRST} cannot be asked: {problem}")


def _answer() -> dict[str, Any]:
    from dist_aclgraph.device.npu import Npu, load_torch_npu, translated

    try:
        load_torch_npu("npu")
        with translated("opening the device"):
            npu = Npu("npu")
            memory = npu.memory()
        return asdict(NpuFacts(npu.name, npu.cann, memory.total_bytes >> 20))
    except DistAclGraphError as e:
        return {"error": str(e)}


if __name__ == "__main__":
    print(json.dumps(_answer()), flush=True)
