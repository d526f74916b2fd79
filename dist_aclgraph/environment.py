"""Environment variables: those that this process reads, and those that child processes get.

The only reader and writer of ``os.environ``.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dist_aclgraph.config import Config, DeviceConfig, HcclExpansion

# The names of HCCL_OP_EXPANSION_MODE. FFTS+ is the mode of an A2 if the host expands.
HCCL_EXPANSION_NAMES: dict[HcclExpansion, str] = {"AIV": "AIV", "AICPU": "AI_CPU", "FFTS": "HOST"}

EMULATED_VARIABLE = "EMULATED_NPU"  # read by the emulated libraries too
RAYLET_VARIABLE = "RAY_RAYLET_PID"  # Ray sets it for all processes that a raylet starts
# Plans and limits rest on these: on all nodes they have the configuration's values.
CONFIGURED_HCCL = {
    "HCCL_EXEC_TIMEOUT": "timeouts.step_s",
    "HCCL_BUFFSIZE": "device.hccl_buffer_mb",
    "HCCL_CONNECT_TIMEOUT": "timeouts.join_s",
}
API_KEY_VARIABLE = "DIST_ACLGRAPH_API_KEY"


def child_environment(config: Config) -> dict[str, str]:
    """Return the environment of worker processes: variables for torch and Ray that nothing else may
    set.
    """
    variables = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HCCL_EXEC_TIMEOUT": str(config.timeouts.collective_s),
        "HCCL_CONNECT_TIMEOUT": str(math.ceil(max(120.0, config.timeouts.join_s))),
    }
    if (expansion := config.device.hccl_expansion) is not None:
        variables["HCCL_OP_EXPANSION_MODE"] = HCCL_EXPANSION_NAMES[expansion]
    return variables


def python_environment(config: Config) -> dict[str, str]:
    """Return the environment of a Python that finds this process's modules, and loads torch as
    worker processes do.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, **child_environment(config), "PYTHONPATH": paths}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with further variables."""
    return {**os.environ, **variables}


def take_over_environment(variables: Mapping[str, str]) -> None:
    """Replace this process's environment."""
    os.environ.clear()
    os.environ.update(variables)


def raylet_pid() -> int | None:
    """Return the process id of the raylet that started this process, if one did."""
    value = os.environ.get(RAYLET_VARIABLE)
    return None if value is None else int(value)


def prepare_network(config: DeviceConfig, address: str | None = None) -> None:
    """Set, before torch_npu is loaded, the network variables of this node; existing values stay.

    So the environment of a node's ``ray start`` overrides the configuration, which is the same for
    all nodes.

    Args:
        address: this node's own address, if the ranks of its group are on several nodes; HCCL uses
            it if no other variable selects one.
    """
    asked = {
        "HCCL_SOCKET_IFNAME": config.hccl_interfaces,
        "HCCL_HOST_SOCKET_PORT_RANGE": config.hccl_host_ports,
        "HCCL_NPU_SOCKET_PORT_RANGE": config.hccl_npu_ports,
        "GLOO_SOCKET_IFNAME": config.gloo_interface,
    }
    for name, value in asked.items():
        if value is not None:
            os.environ.setdefault(name, value)
    # HCCL prefers it to interfaces, so it is not set if interfaces are selected.
    if address is not None and "HCCL_SOCKET_IFNAME" not in os.environ:
        os.environ.setdefault("HCCL_IF_IP", address)


def set_hccl_buffsize(mb: int) -> None:
    """Set HCCL's buffer of domains without an option of their own. torch_npu reads the variable
    once, when this process makes its first communicator.
    """
    os.environ["HCCL_BUFFSIZE"] = str(mb)


def network_variables() -> dict[str, str]:
    """Return the variables of this process's environment for HCCL and Gloo."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("HCCL_", "GLOO_"))
    }


def sourced_cann() -> Path | None:
    """Return the path of CANN by its own set-up script, or None if the script was not sourced."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return None


def cann_scripts() -> list[Path]:
    """Return the installed set-up scripts of CANN, that of the newest layout first."""
    root = Path(os.environ.get("ASCEND_INSTALL_PATH") or "/usr/local/Ascend")
    scripts = [root / folder / "set_env.sh" for folder in ("cann", "ascend-toolkit")]
    return [script for script in scripts if script.is_file()]


def ascend_toolkit() -> Path:
    """Return the path of CANN by its own set-up script, or its default path."""
    if sourced := sourced_cann():
        return sourced
    # From 8.5 on CANN is in cann/, before in ascend-toolkit/latest/.
    folders = [script.parent for script in cann_scripts()]
    found = folders[0] if folders else Path("/usr/local/Ascend/cann")
    return found / "latest" if found.name == "ascend-toolkit" else found


def prepare_device(config: DeviceConfig, *, is_npu: bool, deterministic: bool) -> None:
    """Set, before torch_npu is loaded, the variables that depend on this process's device.

    A user's settings of the allocator stay.

    Args:
        deterministic: whether collectives sum in a fixed order.
    """
    task_queue = config.task_queue if config.task_queue is not None else int(is_npu)
    os.environ["TASK_QUEUE_ENABLE"] = str(task_queue)
    segments = config.expandable_segments
    if segments or (segments is None and is_npu):
        os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ["HCCL_DETERMINISTIC"] = "true"


def cache_directory() -> Path:
    """Return the user's folder for files that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dist-aclgraph"


def build_environment() -> dict[str, str]:
    """Return the environment of a compiler run: this one, without the flags of an outer make."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}


def launch_blocking() -> bool:
    """Whether the environment makes every launch wait for the device, for debugging."""
    return os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"


def is_soft_partition() -> bool:
    """Whether the NPU that this process has opened is a soft partition (eNPU).

    The library of soft partitions sets the variable by C's setenv, which ``os.environ`` misses.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return (getenv(b"ENPU_ENABLE") or b"").lower() == b"true"


def ray_address() -> str | None:
    """Return the Ray cluster that the environment names, e.g. ``auto`` on one of its nodes."""
    return os.environ.get("RAY_ADDRESS") or None


def api_key() -> str | None:
    """Return the HTTP service's API key from the environment, if there is one."""
    return os.environ.get(API_KEY_VARIABLE) or None


def prepare_ray_environment(*, is_local: bool) -> None:
    """Set, before Ray starts, variables with unsuitable defaults; a user's values stay.

    Args:
        is_local: whether we start, or have started, this Ray. A cluster that others have started
            keeps its own settings.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Calls to a lost head end after so many seconds instead of a minute.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_local:
        # A client of Ray can run code. If RAY_AUTH_MODE is not set, Ray requires a token. This is
        # its switch for clusters of several machines, on all systems: off means loopback only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # A worker may wait for cores, or for the fork server; our own limits cover this.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
        # When memory runs short, Ray would end our actors instead of the program that takes the
        # memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")


def disable_backend_autoload() -> None:
    """Stop torch from importing torch_npu by itself: the emulator's libraries must come first."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def emulated_environment(
    libraries: Path, packages: Path, programs: Path, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a program that finds the emulated NPU, in any order of imports.

    Args:
        libraries: folder of the emulated CANN.
        packages: folder of this package.
        programs: folder of this interpreter, with pytest and similar programs.
        settings: settings of the emulator; see ``emulator/README.md``.
    """
    paths = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": packages, "PATH": programs}
    variables = {
        name: os.pathsep.join(filter(None, (str(path), os.environ.get(name))))
        for name, path in paths.items()
    }
    variables[EMULATED_VARIABLE] = " ".join(f"{k}={v}" for k, v in settings.items()) or " "
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    return {**os.environ, **variables}


def has_emulated_environment() -> bool:
    """Whether this process was started in ``emulated_environment``."""
    return EMULATED_VARIABLE in os.environ


def visible_devices() -> tuple[int, ...] | None:
    """Physical NPU ids that this process may use, or None without a restriction."""
    value = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(int(part) for part in value.split(",") if part.strip())
