"""The build of the installed torch. If torch is built for CUDA, some versions of torch_npu end the
process with a message that does not name the cause. So the build is checked before torch or
torch_npu is imported.

``python -m dist_aclgraph.device.torch_build`` fails if torch is built for CUDA.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from dist_aclgraph.device.versions import installed_line
from dist_aclgraph.errors import DeviceError

REMEDY = (
    f"pip install torch=={installed_line().torch} --index-url https://download.pytorch.org/whl/cpu"
)
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)


def cuda_version() -> str:
    """Return the version of CUDA for which the installed torch is built; "" if none."""
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # the name torch stands for an object that is not a package
        return ""
    if found is None or found.origin is None:
        return ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    match = _CUDA.search(text)
    return match[1] if match else ""


def check_torch() -> None:
    """Check that torch_npu can be imported together with the installed torch.

    Raises:
        DeviceError: torch is built for CUDA, and this torch_npu does not work with such a torch.
    """
    if (cuda := cuda_version()) and not installed_line().loads_beside_cuda:
        raise DeviceError(
            f"the installed torch is built for CUDA {cuda}, and torch_npu cannot be loaded beside "
            f"it; install the build for CPUs: {REMEDY}"
        )


if __name__ == "__main__":
    sys.exit(bool(cuda_version()))
