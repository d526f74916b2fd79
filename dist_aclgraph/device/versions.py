"""The supported release series of torch_npu, and the differences between them that affect this
package.

This module does not import torch. ``pyproject.toml`` has an extra for each release series, for
example ``npu-2.12`` for 2.12.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionLine:
    """One release series of torch_npu, with the versions of torch and CANN that belong to it.

    Attributes:
        torch, torch_npu: the versions that the extra of this release series installs.
        cann: the release of CANN that must be installed with this torch_npu.
        is_published: whether the publisher of torch_npu lists these versions of torch_npu and CANN
            as compatible.
        forgets_failed_captures: whether torch_npu's allocator removes its record of a capture that
            CANN has refused to begin or to end. If false, all calls of ``torch.npu.graph`` and
            ``torch.npu.empty_cache`` after such a capture fail.
        all_gather, reduce_scatter: the names of the functions of torch.distributed that run these
            collectives on a single tensor.
    """

    torch: str
    torch_npu: str
    cann: str = "9.1.0"
    is_published: bool = True
    forgets_failed_captures: bool = False
    all_gather: str = "all_gather_into_tensor"
    reduce_scatter: str = "reduce_scatter_tensor"


# Sources of the torch_npu versions for CANN 9.1.0: vllm-ascend (commit 182b75e) uses torch_npu
# 2.10.0.post4. COMPATIBILITY.en.md of Ascend/pytorch lists torch_npu 2.12.0 as the newest version.
LINES = {
    "2.10": VersionLine("2.10.0", "2.10.0.post4"),
    "2.12": VersionLine("2.12.0", "2.12.0"),
    "2.13": VersionLine(
        "2.13.0",
        "2.13.0",
        is_published=False,
        forgets_failed_captures=True,
        all_gather="all_gather_single",
        reduce_scatter="reduce_scatter_single",
    ),
}
DEFAULT = "2.13"  # ``make`` installs this series if the variable NPU does not name another series


def installed_name() -> str:
    """Return the release series of the installed torch, or ``DEFAULT`` if it is unknown.

    The release series is unknown if torch is missing or has an unknown version; ``dist-aclgraph
    doctor`` reports both cases as faults.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return DEFAULT
    name = ".".join(version.split(".")[:2])
    return name if name in LINES else DEFAULT


def installed_line() -> VersionLine:
    """Return the release series of the installed torch; see ``installed_name``."""
    return LINES[installed_name()]
