"""Finds out whether CANN's libraries can be loaded. If they cannot, the module suggests a remedy.
This module does not import torch.
"""

from __future__ import annotations

import subprocess
import sys

from dist_aclgraph.environment import cann_scripts, sourced_cann, sourced_parts
from dist_aclgraph.errors import DeviceError

LIBRARIES = ("libascendcl.so", "libhccl.so")  # the libraries with which torch_npu is linked
DRIVER_LIBRARY = "libascend_hal.so"
LOAD_S = 60.0
_LOAD = "import ctypes, sys\nfor name in sys.argv[1:]: ctypes.CDLL(name)"


def load_problem() -> str:
    """Return the reason why torch_npu cannot load CANN; "" if torch_npu can load CANN.

    The libraries are loaded in a child process, because loading them starts threads and opens
    devices.
    """
    for name, path in sourced_parts().items():
        if path is None:
            return f"{name} is not set"
        if not path.exists():
            return f"{path} is missing" + (f" ({name})" if name.isupper() else "")
    try:
        command = [sys.executable, "-c", _LOAD, *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S)
    except subprocess.TimeoutExpired:
        return f"not loaded within {LOAD_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"loading ended with {done.returncode}"]
    return lines[-1].removeprefix("OSError: ")


def load_remedy(problem: str) -> str:
    """Return what to do on this machine if CANN's libraries cannot be loaded."""
    if DRIVER_LIBRARY in problem:
        return "install the Ascend driver, or mount /usr/local/Ascend/driver into the container"
    if toolkit := sourced_cann():
        return (
            f"install CANN completely in {toolkit} (its toolkit and the operators of your chip), "
            "and source its set_env.sh again; or source the set_env.sh of another CANN"
        )
    if scripts := cann_scripts():
        return f"source {scripts[0]} in this shell, and on nodes of a cluster before `ray start`"
    return "install CANN, toolkit and operators of your chip, and source its set_env.sh"


def cannot_load(problem: str) -> DeviceError:
    """Return an error whose text contains the message ``problem`` of the loader, and the remedy."""
    return DeviceError(f"CANN cannot be loaded ({problem}): {load_remedy(problem)}")


def check_cann() -> None:
    """Check that CANN's libraries can be loaded.

    Raises:
        DeviceError: the libraries cannot be loaded; the message contains the remedy.
    """
    if problem := load_problem():
        raise cannot_load(problem)
