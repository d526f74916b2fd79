"""This module decides once which device a deployment uses. All later code, plans included, uses the
configuration that ``decide_device`` returns. This module does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from dist_aclgraph.config import Config
from dist_aclgraph.device.ask import NpuFacts, ask_npu
from dist_aclgraph.device.cann import check_cann
from dist_aclgraph.device.kind import npus_here, resolve_kind
from dist_aclgraph.errors import DeviceError

Use = Literal["plan", "here", "cluster"]

log = logging.getLogger(__name__)


def decide_device(config: Config, use: Use, ask: Callable[[Config], NpuFacts] = ask_npu) -> Config:
    """Return a copy of ``config`` in which the device is decided. The kind ``auto`` is replaced by
    the kind of device that this machine has. For NPUs, ``device.soc``, ``cann`` and ``memory_mb``
    are read from the first NPU of this machine, unless the configuration sets them. If this machine
    has n NPUs, plans assume at least n NPUs on each node.

    If no NPU answers, ``soc``, ``cann`` and ``memory_mb`` stay null, and plans assume documented
    values. The missing answer is an error only if ranks start on this machine.

    Args:
        use: the purpose of the configuration: a plan without ranks, ranks on this machine, or ranks
            on the nodes of a Ray cluster. In a cluster, the kind stays ``auto`` if this node has no
            NPU. Each rank then chooses the kind of its own node. A group refuses ranks with
            different kinds of devices.
        ask: see ``ask_npu``.

    Raises:
        DeviceError: ranks must run on NPUs of this machine, but it has no NPU, CANN cannot be
            loaded, or no NPU answers.
    """
    kind = config.device.kind
    if use == "here" or (kind == "auto" and (use == "plan" or npus_here())):
        kind = resolve_kind(kind)
    config = _with_device(config, kind=kind)
    if kind != "npu" or not (npus := npus_here()):
        return config
    try:
        check_cann()
        if unknown := config.device.unknown:
            found = ask(config)
            config = _with_device(config, **{key: getattr(found, key) for key in unknown})
    except DeviceError as e:
        if use == "here":
            raise
        log.warning("no NPU was asked, and plans assume that %s: %s", config.device.assumed, e)
    if config.device.node_npus is None and len(npus) > config.device.npus_of_node:
        config = _with_device(config, node_npus=len(npus))
    return config


def _with_device(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"device": config.device.model_copy(update=keys)})
