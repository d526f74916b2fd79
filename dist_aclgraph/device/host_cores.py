"""Chooses the CPU cores on which the rank of each NPU runs. The cores are near the NPU.

Ranks choose disjoint cores without communication: every rank reads the same files of the kernel,
and computes the same division of the host's cores among the host's NPUs. Ranks in different
containers also get disjoint cores, because in a container the kernel's files show the NPUs of the
whole host. A rank is bound only if it may use all cores of the host. With fewer cores, a rank would
compute another division, and two ranks could choose the same core. While a deployment is idle, the
cores of its NPUs stay reserved. This module was not tested on a host with NPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device.dcmi import pci_addresses
from dist_aclgraph.device.kind import npus_here
from dist_aclgraph.environment import binds_cores_itself, visible_devices
from dist_aclgraph.errors import NotBoundError

# Each rank needs one core for its launching thread, two for torch_npu's threads, and two for the
# interrupts of its NPU.
CORES_OF_AN_NPU = 5
ONLINE = Path("/sys/devices/system/cpu/online")
NUMA = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
TASKS = Path("/proc/self/task")


def share_cores(
    node_of_core: Mapping[int, int], node_of_npu: Sequence[int | None]
) -> list[frozenset[int]]:
    """Return disjoint sets of cores, one set for the rank of each NPU. If a NUMA node has too few
    cores, the sets of all NPUs of this node are empty.

    The NPUs of a NUMA node share the node's cores. On each NUMA node, about as many cores as one
    NPU gets stay free. The free cores are for the processes that use no NPU (engine, controller,
    ingress). If the NUMA node of at least one NPU is unknown, the function treats the host as a
    single NUMA node.

    Args:
        node_of_core: NUMA node of each core that the ranks may use.
        node_of_npu: NUMA node of each NPU; None if it is unknown.
    """
    if None in node_of_npu:
        node_of_core, node_of_npu = dict.fromkeys(node_of_core, 0), [0] * len(node_of_npu)
    shares = [frozenset[int]()] * len(node_of_npu)
    for node in set(node_of_npu):
        cores = sorted(core for core, its_node in node_of_core.items() if its_node == node)
        npus = [npu for npu, its_node in enumerate(node_of_npu) if its_node == node]
        size = max(len(cores) // (len(npus) + 1), CORES_OF_AN_NPU)
        if size * len(npus) < len(cores):
            for place, npu in enumerate(npus):
                shares[npu] = frozenset(cores[place * size : (place + 1) * size])
    return shares


def shares_here(config: DeviceConfig) -> list[frozenset[int]]:
    """Return, for each NPU of this machine, the host's CPU cores for its rank, in the order of the
    NPUs' ids.

    Raises:
        NotBoundError: ranks are not bound on this machine.
    """
    if config.bind_cores == "off":
        raise NotBoundError("device.bind_cores is off")
    if binds_cores_itself():
        raise NotBoundError("CPU_AFFINITY_CONF is set, so torch_npu binds its threads")
    addresses, cores = own_addresses(), all_cores()
    on_host = addresses_on_host(addresses)
    shares = dict(zip(on_host, share_cores(cores, [_node_of(npu) for npu in on_host]), strict=True))
    if not all(shares[address] for address in addresses):
        raise NotBoundError(
            f"{len(cores)} cores are too few for the host's {len(on_host)} NPUs: each needs "
            f"{CORES_OF_AN_NPU} cores of its NUMA node, and other processes need one core"
        )
    return [shares[address] for address in addresses]


def bind_this_process(config: DeviceConfig) -> frozenset[int]:
    """Bind all threads of this process to the cores of its NPU, and return these cores.

    Raises:
        NotBoundError: this process is not bound.
    """
    shares, visible = shares_here(config), visible_devices() or ()
    if len(visible) != 1 or visible[0] >= len(shares):
        raise NotBoundError(f"ASCEND_RT_VISIBLE_DEVICES names none of {len(shares)} NPUs")
    cores = shares[visible[0]]
    try:
        for task in TASKS.iterdir():  # threads that are started later inherit the cores
            os.sched_setaffinity(int(task.name), cores)
    except OSError as e:
        raise NotBoundError(f"the kernel refuses it: {e}") from e
    return cores


def all_cores() -> dict[int, int]:
    """Return the NUMA node of each core of the host; 0 if the kernel has no nodes.

    Raises:
        NotBoundError: the process may not use all cores of the host, or the host's cores are
            unknown.
    """
    try:
        online = parse_cores(ONLINE.read_text())
    except OSError as e:
        raise NotBoundError(f"the kernel does not show the host's cores: {e}") from e
    usable = os.sched_getaffinity(0)
    if not online <= usable:
        raise NotBoundError(
            f"this process may use {len(online & usable)} of the host's {len(online)} cores, so "
            "its share may overlap with shares in other containers: give the container all cores"
        )
    node_of_core = dict.fromkeys(online, 0)
    for node in NUMA.glob("node[0-9]*"):
        for core in parse_cores((node / "cpulist").read_text()) & online:
            node_of_core[core] = int(node.name.removeprefix("node"))
    return node_of_core


def own_addresses() -> list[str]:
    """Return the PCI addresses of the NPUs of this machine or container, in the order of the NPUs'
    ids.

    Raises:
        NotBoundError: the addresses are unknown; or two NPUs have the same address, and would get
            the same cores.
    """
    addresses, count = pci_addresses(), len(npus_here())
    if not addresses or len(addresses) != count:
        raise NotBoundError(
            f"the driver reports PCI addresses of {len(addresses)} NPUs, and {count} are here"
        )
    if len(set(addresses)) < count:
        raise NotBoundError(
            f"the driver reports {len(set(addresses))} different PCI addresses of {count} NPUs"
        )
    return addresses


def addresses_on_host(addresses: Sequence[str]) -> list[str]:
    """Return the PCI addresses of all NPUs of the host, including NPUs that this container cannot
    use.

    A PCI function of the host is an NPU if it has the same vendor and device id as the functions at
    ``addresses``. The class of a function does not identify NPUs, because Kunpeng's compression
    engines have the same class.

    Raises:
        NotBoundError: one of ``addresses`` is missing in the kernel's files.
    """
    model_of = {path.name: _model_of(path) for path in PCI.glob("*")}
    if hidden := [address for address in addresses if not model_of.get(address)]:
        raise NotBoundError(f"{PCI} does not show the NPU {hidden[0]}")
    models = {model_of[address] for address in addresses}
    return sorted(address for address, model in model_of.items() if model in models)


def _model_of(function: Path) -> str:
    """Return vendor and device id of a PCI function; "" if the kernel does not show both ids."""
    try:
        return (function / "vendor").read_text() + (function / "device").read_text()
    except OSError:
        return ""


def _node_of(address: str) -> int | None:
    try:
        node = int((PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1 means that the firmware does not report the node


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores in the kernel's format, e.g. 0-3,8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def format_cores(cores: frozenset[int]) -> str:
    """Return the cores as a list in the kernel's format, e.g. 0-3,8."""
    firsts = sorted(core for core in cores if core - 1 not in cores)
    lasts = sorted(core for core in cores if core + 1 not in cores)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
