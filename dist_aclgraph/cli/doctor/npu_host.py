"""The host of real NPUs: device nodes and access to them, firmware, RDMA addresses, cores.

Sources: vllm-ascend's container instructions (device nodes, mounts) and its page on CPU binding
(cores), Ascend's Docker runtime (mounts). Nothing here was seen on such a host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dist_aclgraph.cli.doctor.ascend_versions import read_version
from dist_aclgraph.cli.doctor.finding import Finding

# Beside davinci0 and on: the driver's management, its shared memory, its channel to the device.
MANAGEMENT = ("davinci_manager", "devmm_svm", "hisi_hdc")
# A rank has a thread that launches, two of torch_npu, and two interrupts of its NPU.
CORES_OF_AN_NPU = 5


@dataclass(frozen=True)
class HostFiles:
    """The paths that are checked; tests pass other ones."""

    dev: Path = Path("/dev")
    etc: Path = Path("/etc")
    firmware: Path = Path("/usr/local/Ascend/firmware/version.info")
    numa: Path = Path("/sys/devices/system/node")


HOST = HostFiles()


def npu_host_findings(npus: list[str], files: HostFiles = HOST) -> list[Finding]:
    """Return what a host with these NPUs has and lacks.

    Args:
        npus: names of device nodes, e.g. davinci0.
    """
    return [
        _device_nodes(files.dev),
        _access(npus, files.dev),
        _firmware(files.firmware),
        _rdma_addresses(npus, files.etc / "hccn.conf"),
        _cores(len(npus), files.numa),
    ]


def _device_nodes(dev: Path) -> Finding:
    missing = [name for name in MANAGEMENT if not (dev / name).exists()]
    found = f"missing: {', '.join(missing)}" if missing else f"{', '.join(MANAGEMENT)} are there"
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
        remedy = f"to compare it with the driver, mount {path.parent} into the container"
        return Finding("firmware", True, f"no {path}", remedy, is_warning=True)
    return Finding("firmware", True, version)


def _rdma_addresses(npus: list[str], path: Path) -> Finding:
    """``address_0=...`` of each NPU, which HCCL needs between nodes of A2."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        found, lines = f"no {path}", []
    else:
        found = f"{path} has no address of"
    known = {line.partition("=")[0].strip() for line in lines if line.partition("=")[2].strip()}
    lacking = [name for name in npus if f"address_{name.removeprefix('davinci')}" not in known]
    if not lacking:
        return Finding("RDMA addresses", True, f"{path} has one of each NPU")
    if lines:
        found = f"{found} {', '.join(lacking)}"
    remedy = (
        "only for groups over several nodes: set one of each NPU with hccn_tool, and mount "
        f"{path} into containers"
    )
    return Finding("RDMA addresses", True, found, remedy, is_warning=True)


def _cores(num_npus: int, numa: Path) -> Finding:
    """Cores that this process may use, by NUMA node, against what the ranks of all NPUs want."""
    usable = os.sched_getaffinity(0)
    parts = []
    for node in sorted(numa.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = usable & parse_cores((node / "cpulist").read_text())
        parts.append(f"{len(cores)} on NUMA {node.name}")
    found = f"{len(usable)} for {num_npus} NPUs" + (f": {', '.join(parts)}" if parts else "")
    wanted = CORES_OF_AN_NPU * num_npus
    remedy = f"give the container {wanted} cores, {CORES_OF_AN_NPU} an NPU: ranks wait for theirs"
    return Finding("cores", True, found, remedy, is_warning=len(usable) < wanted)


def parse_cores(text: str) -> set[int]:
    """Return the cores of a list as the kernel writes it, e.g. 0-3,8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
