"""Checks a host with real NPUs: device nodes, permissions, firmware, RDMA addresses, cores.

Sources: vllm-ascend's container instructions (device nodes, mounts), vllm-ascend's page on CPU
binding (cores), and Ascend's Docker runtime (mounts). This module was not tested on a host with
NPUs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dist_aclgraph.cli.doctor.ascend_versions import read_version
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.rdma_links import TOOL, find_tool, link_finding
from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device.host_cores import (
    CORES_OF_AN_NPU,
    format_cores,
    parse_cores,
    shares_here,
)
from dist_aclgraph.errors import NotBoundError

# The driver's device nodes for management, for shared memory, and for the channel to the device. A
# process needs these nodes in addition to davinci0, davinci1, ...
MANAGEMENT = ("davinci_manager", "devmm_svm", "hisi_hdc")


@dataclass(frozen=True)
class HostFiles:
    """The paths of files that are checked. Tests use other paths."""

    dev: Path = Path("/dev")
    etc: Path = Path("/etc")
    firmware: Path = Path("/usr/local/Ascend/firmware/version.info")
    numa: Path = Path("/sys/devices/system/node")
    hccn_tool: Path = TOOL


HOST = HostFiles()
HCCN = "hccn.conf"


def npu_host_findings(npus: list[str], files: HostFiles = HOST) -> list[Finding]:
    """Return the findings about a host with these NPUs.

    Args:
        npus: names of device nodes, e.g. davinci0.
    """
    return [
        _device_nodes(files.dev),
        _access(npus, files.dev),
        _firmware(files.firmware),
        _rdma_addresses(npus, files.etc / HCCN),
        link_finding(npus, find_tool(files.hccn_tool)),
        _cores(len(npus), files.numa),
        _binding(npus),
    ]


def _device_nodes(dev: Path) -> Finding:
    missing = [name for name in MANAGEMENT if not (dev / name).exists()]
    found = f"missing: {', '.join(missing)}" if missing else f"{', '.join(MANAGEMENT)} exist"
    options = " ".join(f"--device=/dev/{name}" for name in missing)
    return Finding(
        "device nodes", not missing, found, f"install the driver, or give the container {options}"
    )


def _access(npus: list[str], dev: Path) -> Finding:
    nodes = [dev / name for name in (*npus, *MANAGEMENT)]
    closed = [p.name for p in nodes if p.exists() and not os.access(p, os.R_OK | os.W_OK)]
    found = f"this user may not open {', '.join(closed)}" if closed else "this user may open all"
    remedy = "add the user to the driver's group: usermod -aG HwHiAiUser USER"
    return Finding("device access", not closed, found, remedy)


def _firmware(path: Path) -> Finding:
    version = read_version(path)
    if version is None:
        remedy = (
            f"mount {path.parent} into the container, so that the versions of firmware and driver "
            "can be compared"
        )
        return Finding("firmware", True, f"no {path}", remedy, is_warning=True)
    return Finding("firmware", True, version)


def _rdma_addresses(npus: list[str], path: Path) -> Finding:
    known = read_rdma_addresses(path)
    lacking = [name for name in npus if name not in known]
    if not lacking:
        return Finding("RDMA addresses", True, f"{path} has one of each NPU")
    found = f"{path} has no address of {', '.join(lacking)}" if path.exists() else f"no {path}"
    remedy = (
        "only groups over several nodes need it: give each NPU an address with hccn_tool, and "
        f"mount {path} into containers"
    )
    return Finding("RDMA addresses", True, found, remedy, is_warning=True)


def read_rdma_addresses(path: Path = HOST.etc / HCCN) -> dict[str, str]:
    """Return each NPU's address for links between nodes, from lines such as ``address_0=...``."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = re.findall(r"^\s*address_([0-9]+)\s*=\s*(\S+)", text, re.MULTILINE)
    return {f"davinci{number}": address for number, address in found}


def _cores(num_npus: int, numa: Path) -> Finding:
    """Return the finding that says whether this process has enough cores for all ranks. The finding
    lists the number of cores on each NUMA node.
    """
    usable = os.sched_getaffinity(0)
    parts = []
    for node in sorted(numa.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = usable & parse_cores((node / "cpulist").read_text())
        parts.append(f"{len(cores)} on NUMA {node.name}")
    found = f"{len(usable)} for {num_npus} NPUs" + (f": {', '.join(parts)}" if parts else "")
    wanted = CORES_OF_AN_NPU * num_npus
    remedy = (
        f"give the container more than {wanted} cores, {CORES_OF_AN_NPU} for each NPU and some for "
        "the other processes: steps are slower while processes wait for cores"
    )
    return Finding("cores", True, found, remedy, is_warning=len(usable) <= wanted)


def _binding(npus: list[str]) -> Finding:
    """Return the finding that lists the cores to which each rank is bound on this host."""
    try:
        shares = shares_here(DeviceConfig())
    except NotBoundError as e:
        return Finding("cores of ranks", True, f"ranks are not bound to cores: {e}")
    each = ", ".join(
        f"{npu}: {format_cores(cores)}" for npu, cores in zip(npus, shares, strict=True)
    )
    return Finding("cores of ranks", True, each)
