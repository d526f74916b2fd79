"""The facts about each node, which ``doctor --cluster`` compares. Imports neither torch nor Ray."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field

from dist_aclgraph.cli.doctor.ascend_versions import DRIVER, read_cann_version, read_version
from dist_aclgraph.cli.doctor.examine import machine_findings
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.npu_host import read_rdma_addresses
from dist_aclgraph.device.kind import npus_here
from dist_aclgraph.environment import ascend_toolkit
from dist_aclgraph.version import build

PACKAGES = ("torch", "torch-npu", "ray")


@dataclass(frozen=True)
class NodeFacts:
    """The facts that one node reports about itself.

    Attributes:
        versions: maps the names of installed software to versions. Only nodes with NPUs report the
            versions of CANN and of the driver.
        npus: names of the node's NPUs.
        rdma_addresses: maps the names of NPUs to their RDMA addresses.
        sizes: the node's number of NPUs, number of cores, and memory. Nodes with NPUs should have
            equal sizes.
        findings: all findings of ``doctor`` on the node.
    """

    versions: dict[str, str]
    npus: tuple[str, ...] = ()
    rdma_addresses: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def node_facts(*, uses_hixl: bool = False) -> NodeFacts:
    """Return the facts about this node; see ``machine_findings``."""
    npus = tuple(npus_here())
    ascend = {
        "CANN": read_cann_version(ascend_toolkit()) or "none",
        "driver": read_version(DRIVER) or "none",
    }
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return NodeFacts(
        versions={
            "dist_aclgraph": build(),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            **(ascend if npus else {}),
        },
        npus=npus,
        rdma_addresses=read_rdma_addresses(),
        sizes={
            "NPUs": str(len(npus)),
            "cores": str(len(os.sched_getaffinity(0))),
            "memory": f"{round(memory_bytes / (1 << 30))} GiB",
        },
        findings=tuple(machine_findings(uses_hixl=uses_hixl)),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
