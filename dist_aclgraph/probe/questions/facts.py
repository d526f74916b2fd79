"""Questions about facts of the machine.

Most of these questions have no expected answer. On the emulator, some answers only repeat the
emulator's settings.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path

from dist_aclgraph.device.cann import load_problem
from dist_aclgraph.device.kind import DEV, npus_here
from dist_aclgraph.environment import ascend_toolkit, sourced_cann
from dist_aclgraph.probe.question import Answer, Bench, Between, Level, Probe

DRIVER = Path("/usr/local/Ascend/driver/version.info")
NUMA = Path("/sys/devices/system/node")
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")  # device nodes that each process opens
MAX_FILE_BYTES = 4096
NONE = "none"


def machine_here() -> dict[str, str]:
    """Return values that identify this host and its software."""
    return {
        "host": socket.gethostname(),
        "wheels": wheels_here(),
        "driver": _beginning_of(DRIVER),
    }


def _machine(bench: Bench) -> str:
    return f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"


def wheels_here() -> str:
    """Return the names and versions of the installed wheels."""
    found = []
    for name in ("torch", "torch-npu", "ray"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _wheels(bench: Bench) -> str:
    return wheels_here()


def _beginning_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as e:
        return f"{path}: {e.strerror}"


def _cann_files(bench: Bench) -> Answer:
    toolkit = ascend_toolkit()
    sourced = " (sourced)" if sourced_cann() else ""
    text = _beginning_of(toolkit / "share/info/runtime/version.info")
    return Answer(f"{toolkit}{sourced}" if toolkit.is_dir() else NONE, text)


def _driver(bench: Bench) -> Answer:
    return Answer(str(DRIVER) if DRIVER.is_file() else NONE, _beginning_of(DRIVER))


def _nodes(bench: Bench) -> str:
    names = [*npus_here(), *(name for name in MANAGERS if (DEV / name).exists())]
    closed = [name for name in names if not os.access(DEV / name, os.R_OK | os.W_OK)]
    return ", ".join(f"{n} (no access)" if n in closed else n for n in names) or NONE


def _cores(bench: Bench) -> str:
    nodes = len(list(NUMA.glob("node[0-9]*")))
    return f"{len(os.sched_getaffinity(0))} usable cores of {os.cpu_count()}, {nodes} NUMA nodes"


def _libraries(bench: Bench) -> str:
    return load_problem() or "loaded"


def _chip(bench: Bench) -> str:
    return str(bench.npu.name)


def _cann(bench: Bench) -> Answer:
    cann = str(bench.npu.cann)
    return Answer(cann) if cann else Answer(NONE, "CANN does not tell its version")


def _memory(bench: Bench) -> float:
    return float(bench.npu.memory().total_bytes >> 20)


def _streams(bench: Bench) -> float:
    return float(bench.npu.available_streams())


def _threads(bench: Bench) -> Answer:
    tasks = sorted(Path("/proc/self/task").iterdir())
    names = [(task / "comm").read_text().strip() for task in tasks]
    return Answer(f"{len(names)} threads", ", ".join(names))


def _fork(bench: Bench) -> str:
    child = os.fork()
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return "the child ends" if status == 0 else f"the child ends with status {status}"


def _of_machine(
    name: str, question: str, call: Callable[[Bench], str | Answer], level: Level = "full"
) -> Probe:
    return Probe(f"facts.{name}", question, call, None, level, needs_device=False)


PROBES = (
    _of_machine("machine", "Which machine is it?", _machine, "quick"),
    _of_machine("wheels", "Which wheels are there?", _wheels, "quick"),
    _of_machine("cann_files", "Which CANN is installed?", _cann_files, "quick"),
    _of_machine("driver", "Which driver is installed?", _driver, "quick"),
    _of_machine("nodes", "Which device nodes are there?", _nodes, "quick"),
    _of_machine("cores", "How many cores are there?", _cores),
    _of_machine("libraries", "Can CANN's libraries be loaded?", _libraries),
    Probe("facts.chip", "Which chip is it?", _chip, None, "quick", setting="soc"),
    Probe("facts.cann", "Which CANN does the runtime name?", _cann, None, "quick", setting="cann"),
    Probe(
        "facts.memory",
        "How many MiB of memory does the device have?",
        _memory,
        None,
        setting="hbm_mb",
    ),
    Probe(
        "facts.streams",
        "How many streams can a fresh device give?",
        _streams,
        Between(1900, 2048, "streams"),
        "quick",
        setting="streams",
    ),
    Probe("facts.threads", "Which threads run after the device is open?", _threads, None),
    Probe("facts.fork", "Can a process with an open device fork?", _fork, "the child ends"),
)
