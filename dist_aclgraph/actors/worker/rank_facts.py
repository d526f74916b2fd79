"""The facts that a worker sends to the controller about its rank: process, device and weights."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.device.kind import DeviceKind


@dataclass(frozen=True)
class WorkerInfo:
    """The process, node and device of a worker."""

    node_id: str
    node_ip: str
    host: str
    pid: int
    npu_ids: tuple[int, ...]
    kind: DeviceKind = "emulated"
    # Whether the worker still has the weights that it loaded for a previous group.
    has_weights: bool = False
    build: str = ""


@dataclass(frozen=True)
class JoinedDevice:
    """The device of a rank that has joined its group.

    Attributes:
        description: text for users about the device and the host's cores to which the rank is
            bound.
        ranks_of_node: number of ranks that each node must run. The number depends on the chip and
            on the CANN version. None if a node can run any number of ranks.
    """

    description: str
    ranks_of_node: int | None = None


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of a rank.

    Attributes:
        fusions: the fused operators that the rank uses (``Fusions.report``).
    """

    num_bytes: int
    fusions: dict[str, str]
