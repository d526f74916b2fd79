"""Checks this machine's hardware and software for ``dist-aclgraph doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time

from dist_aclgraph.actors.wire.peers import PeersKey
from dist_aclgraph.cli.doctor.ascend_versions import (
    DRIVER,
    MIN_DRIVER,
    is_driver_new_enough,
    read_cann_version,
    read_version,
)
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.kv_folders import kv_findings
from dist_aclgraph.cli.doctor.network import network_problem, overridden_warning, port_warning
from dist_aclgraph.cli.doctor.npu_host import npu_host_findings
from dist_aclgraph.cli.last_start import last_start
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.cann import load_problem, load_remedy
from dist_aclgraph.device.kind import npus_here
from dist_aclgraph.device.versions import installed_line
from dist_aclgraph.environment import ascend_toolkit, network_variables
from dist_aclgraph.errors import ConfigError

MIN_SHM_BYTES = 256 << 20
PYTHONS = ((3, 11), (3, 12), (3, 13))
RAY = "2.60.0"


def examine(config: Config | None = None) -> list[Finding]:
    """Return all findings. Imports neither torch nor Ray, and starts no process.

    Args:
        config: a configuration. The function checks three settings: the folders for copies of KV
            blocks, the transport that fetches copies from other nodes, and the file with the
            transport's secret.
    """
    folders = [] if config is None else [*kv_findings(config), *peers_findings(config)]
    uses_hixl = config is not None and config.fetches_by_hixl
    return [*machine_findings(uses_hixl=uses_hixl), *folders, _port(8000), *_graphs()]


def machine_findings(*, uses_hixl: bool = False) -> list[Finding]:
    """Return the findings about this machine. In a cluster, each node reports these findings about
    itself.

    Args:
        uses_hixl: whether copies of KV blocks are fetched over HIXL.
    """
    npus = npus_here()
    is_built = not npus and emulator.is_built()
    device = device_finding(npus, is_emulator_built=is_built)
    compiler = compiler_finding(npus, emulator.missing_tools(), is_emulator_built=is_built)
    line = installed_line()
    pinned = {"torch": line.torch, "torch-npu": line.torch_npu, "ray": RAY}
    versions = [_package(name, wanted) for name, wanted in pinned.items()]
    packages = [_python(), *versions, _torch_build()]
    ascend = (
        [*npu_host_findings(npus), _cann(), cann_libraries_finding(), _driver()] if npus else []
    )
    hixl = [hixl_finding(npus)] if uses_hixl else []
    machine = [device, *ascend, compiler, _shared_memory(), _network(), *hixl]
    return [*packages, *machine]


def _python() -> Finding:
    is_ok = sys.version_info[:2] in PYTHONS
    known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    remedy = f"install one of Python {known}"
    return Finding("python", is_ok, platform.python_version(), remedy)


def _package(name: str, wanted: str) -> Finding:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", _pip_install(name, wanted))
    is_ok = found.split("+")[0] == wanted
    return Finding(name, is_ok, found, _pip_install(name, wanted))


def _pip_install(name: str, wanted: str) -> str:
    return f"{sys.executable} -m pip install {name}=={wanted}"


def _cann() -> Finding:
    wanted = installed_line().cann
    toolkit = ascend_toolkit()
    found = read_cann_version(toolkit)
    line = wanted.rpartition(".")[0]
    return Finding(
        "CANN",
        found is not None and found.startswith(line),
        f"{found or 'none'} in {toolkit}",
        f"install CANN {wanted}, toolkit and operators of your chip, and source its set_env.sh",
    )


def cann_libraries_finding() -> Finding:
    """Return the finding that says whether processes started from this shell can load CANN."""
    problem = load_problem()
    return Finding("CANN libraries", not problem, problem or "can be loaded", load_remedy(problem))


def hixl_finding(npus: list[str]) -> Finding:
    """Return the finding that says whether this Python has CANN's package ``hixl``."""
    name = "kv.transport=hixl"
    if not npus:
        return Finding(name, True, "the emulated NPU has the package hixl")
    found = importlib.util.find_spec("hixl")
    if found is not None:
        return Finding(name, True, f"CANN's package hixl is {found.origin}")
    remedy = "install a CANN that has it and source its set_env.sh, or set kv.transport to sockets"
    return Finding(name, False, f"{sys.executable} does not find CANN's package hixl", remedy)


def peers_findings(config: Config) -> list[Finding]:
    """Return the finding about the secret that services need to fetch copies of KV blocks from each
    other. The list is empty if no secret is configured.
    """
    path = config.kv.peers_key_file
    if path is None:
        return []
    try:
        PeersKey.read(config)
    except ConfigError as e:
        remedy = "write the secret of all services into it, as of: openssl rand -hex 32"
        return [Finding("kv.peers_key_file", False, str(e), remedy)]
    return [Finding("kv.peers_key_file", True, f"{path} has a key")]


def _driver() -> Finding:
    found = read_version(DRIVER)
    wanted = ".".join(map(str, MIN_DRIVER))
    return Finding(
        "driver",
        found is not None and is_driver_new_enough(found),
        found or f"no {DRIVER}",
        f"install an Ascend driver from {wanted} on, and mount {DRIVER.parent} into containers",
    )


def _network() -> Finding:
    """Return the finding about the environment variables that HCCL needs to reach other nodes.

    If the configuration sets a variable, all workers get the configured value. Otherwise each
    worker inherits the variable from the shell in which `ray start` was called on the worker's
    node.
    """
    variables = network_variables()
    told = ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))
    if problem := network_problem(variables, [name for _, name in socket.if_nameindex()]):
        remedy = "set it in the environment of this node's `ray start`: docs/operate/cluster.md"
        return Finding("network", False, problem, remedy)
    if warning := port_warning(variables):
        remedy = "reserve them: sysctl -w net.ipv4.ip_local_reserved_ports=FIRST-LAST"
        return Finding("network", True, warning, remedy, is_warning=True)
    if warning := overridden_warning(variables):
        remedy = "unset them here, and set the keys that stand behind them in the configuration"
        return Finding("network", True, warning, remedy, is_warning=True)
    nothing = "no HCCL_* or GLOO_* is set; groups over several nodes use Ray's address of each node"
    return Finding("network", True, told or nothing)


def _torch_build() -> Finding:
    cuda = emulator.cuda_version()
    is_refused = not emulator.loads_torch_npu()
    found = f"for CUDA {cuda}" if cuda else "for CPUs"
    if is_refused:
        found += ", beside which torch_npu cannot be loaded"
    remedy = f"{sys.executable} -m {emulator.torch_remedy()}" if is_refused else ""
    return Finding("torch build", not is_refused, found, remedy)


def device_finding(npus: list[str], *, is_emulator_built: bool) -> Finding:
    """Return the finding that says on which devices of this machine ranks can run.

    A missing device is only a warning, because the head of a cluster needs no device.

    Args:
        npus: names of this machine's NPUs.
    """
    if npus:
        return Finding("device", True, f"{len(npus)} NPUs: {', '.join(npus)}")
    if is_emulator_built:
        return Finding("device", True, "no NPU here; the emulated NPU is built and will be used")
    found = "no NPU here, and the emulated NPU is not built: enough for the head of a cluster"
    remedy = (
        "on a host that has NPUs, give the container /dev/davinci*, as cluster/cluster-docker.yaml "
        "does; to serve without, nothing: the emulated NPU is built at its first use, or with "
        f"{sys.executable} -m dist_aclgraph.device.emulator"
    )
    return Finding("device", True, found, remedy, is_warning=True)


def compiler_finding(npus: list[str], missing: list[str], *, is_emulator_built: bool) -> Finding:
    """Return the finding that says whether this machine can build the emulated NPU. A machine with
    NPUs or with a built emulator needs no compiler. On any other machine, a missing compiler is a
    warning.

    Args:
        npus: names of this machine's NPUs.
        missing: programs that the build requires and that this machine lacks.
    """
    if not missing:
        return Finding("compiler", True, str(shutil.which("g++")))
    found = f"no {' and no '.join(missing)}"
    if npus:
        return Finding("compiler", True, f"{found}; with NPUs none is needed")
    if is_emulator_built:
        return Finding("compiler", True, f"{found}; the emulated NPU is built, none is needed")
    remedy = (
        "only to serve here with emulated NPUs: install g++ and make (Debian, Ubuntu: apt-get "
        "install g++ make)"
    )
    found = f"{found}: enough for the head of a cluster"
    return Finding("compiler", True, found, remedy, is_warning=True)


def _shared_memory() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", False, "missing", "mount a tmpfs there")
    free = stat.f_bavail * stat.f_frsize
    remedy = "give a container more with --shm-size=1g"
    return Finding("/dev/shm", free >= MIN_SHM_BYTES, f"{free >> 20} MiB free", remedy)


def _graphs() -> list[Finding]:
    """Return findings about slow operators in the graphs of the last deployment on this machine."""
    if (start := last_start()) is None:
        return []
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start["time_s"]))
    name = f"graphs of {start['name']}, started {when}"
    warnings = start["report"].get("graph_warnings", [])
    if not warnings:
        return [Finding(name, True, "no operator is known to run on the AI CPU")]
    remedy = (
        "answers are right, steps are slower; report the model, its configuration and this line"
    )
    return [Finding(name, True, "; ".join(warnings), remedy, is_warning=True)]


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            remedy = "stop what listens there, or choose another with serve.port=N"
            return Finding(f"port {port}", False, "in use", remedy)
    return Finding(f"port {port}", True, "free")
