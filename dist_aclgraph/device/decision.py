"""Which device a deployment runs on, decided once: everything behind it, plans first, goes by the
configuration that is returned here. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from dist_aclgraph.config import Config
from dist_aclgraph.device.cann import check_cann
from dist_aclgraph.device.kind import npus_here, resolve_kind

Use = Literal["plan", "here", "cluster"]


def decide_device(config: Config, use: Use) -> Config:
    """Return the configuration with the kind of device that ``auto`` means.

    Args:
        use: what the configuration is for: a plan alone, ranks on this machine, or ranks on the
            nodes of a Ray cluster. There ``auto`` stays where this node has no NPU: each rank finds
            out, and a group refuses to mix kinds.

    Raises:
        DeviceError: ranks are to run on NPUs here, and there are none, or CANN cannot be loaded.
    """
    kind = config.device.kind
    if use == "here" or (kind == "auto" and (use == "plan" or npus_here())):
        kind = resolve_kind(kind)
    if use == "here" and kind == "npu":
        check_cann()
    return _with_device(config, kind=kind)


def _with_device(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"device": config.device.model_copy(update=keys)})
