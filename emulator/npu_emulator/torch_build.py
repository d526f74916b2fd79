"""Checks whether torch_npu works with the installed torch.

If torch is built for CUDA, torch_npu 2.13 ends the process with a message that does not name the
cause. So this module checks the build before torch or torch_npu is imported.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from npu_emulator.errors import EmulatorError

_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)
_LOADS_BESIDE_CUDA = ("2.10", "2.12")  # release series of torch_npu


def check_installed() -> None:
    """Check that torch and torch_npu are installed.

    Raises:
        EmulatorError: torch or torch_npu is missing.
    """
    for name in ("torch", "torch_npu"):
        if not _version(name):
            raise EmulatorError(
                f"{name} is not installed in this environment; install torch and torch-npu of one "
                "release series, for example torch==2.13.0 and torch-npu==2.13.0"
            )


def torch_series() -> str:
    """Return the release series of the installed torch, for example 2.13; "none" without torch."""
    return ".".join(_version("torch").split(".")[:2]) or "none"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cuda_version() -> str:
    """Return the version of CUDA for which the installed torch is built; "" if it is built without
    CUDA.
    """
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # sys.modules contains an object named torch that is no package
        return ""
    if found is None or found.origin is None:
        return ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    match = _CUDA.search(text)
    return match[1] if match else ""


def loads_torch_npu() -> bool:
    """Return whether torch_npu can be imported together with the installed torch."""
    return not cuda_version() or torch_series() in _LOADS_BESIDE_CUDA


def remedy() -> str:
    """Return the command that installs torch's build for CPUs."""
    release = _version("torch").partition("+")[0]
    return f"pip install torch=={release} --index-url https://download.pytorch.org/whl/cpu"


def check_torch() -> None:
    """Check that torch_npu can be imported together with the installed torch.

    Raises:
        EmulatorError: torch is built for CUDA, and the installed torch_npu does not work with such
            a build.
    """
    if not loads_torch_npu():
        raise EmulatorError(
            f"the installed torch is built for CUDA {cuda_version()}, and torch_npu cannot be "
            f"loaded beside it; install the build for CPUs: {remedy()}"
        )
