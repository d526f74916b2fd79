"""Reads environment variables of this process, and sets variables for its child processes.

This module is the only reader and writer of ``os.environ``.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dist_aclgraph.config import Config, DeviceConfig, HcclExpansion

# Values of HCCL_OP_EXPANSION_MODE. With HOST, the host unrolls collectives; on an A2, this mode
# uses FFTS+.
HCCL_EXPANSION_NAMES: dict[HcclExpansion, str] = {"AIV": "AIV", "AICPU": "AI_CPU", "FFTS": "HOST"}

RAYLET_VARIABLE = "RAY_RAYLET_PID"  # Ray sets this variable in all processes of a raylet
GCS_WAIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
GCS_WAIT_S = 300.0  # must equal the value in cluster/environment.sh
# All nodes get the configuration's values of these variables, because plans and limits depend on
# them.
CONFIGURED_HCCL = {
    "HCCL_EXEC_TIMEOUT": "timeouts.step_s",
    "HCCL_BUFFSIZE": "device.hccl_buffer_mb",
    "HCCL_CONNECT_TIMEOUT": "timeouts.join_s",
}
ASCEND = Path("/usr/local/Ascend")  # default folder of a CANN that root has installed
API_KEY_VARIABLE = "DIST_ACLGRAPH_API_KEY"


def child_environment(config: Config) -> dict[str, str]:
    """Return environment variables of worker processes. No other code may set these variables."""
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
    """Return the environment for a Python process that must find this process's modules.

    The environment also contains the variables of worker processes (``child_environment``).
    """
    paths = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, **child_environment(config), "PYTHONPATH": paths}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with additional variables."""
    return {**os.environ, **variables}


def take_over_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def raylet_pid() -> int | None:
    """Return the process id of the raylet that started this process; None if no raylet has started
    it.
    """
    value = os.environ.get(RAYLET_VARIABLE)
    return None if value is None else int(value)


def prepare_network(config: DeviceConfig, address: str | None = None) -> None:
    """Set this node's network variables before torch_npu is loaded. Existing values are not
    changed.

    The configuration is the same for all nodes. If one node needs another value, the user sets the
    variable for ``ray start`` on this node. The processes of the node inherit the variable.

    Args:
        address: this node's own address, if the ranks of its group are on several nodes. HCCL uses
            this address unless another variable selects an address.
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
    # If the user has selected interfaces, no address is set, because HCCL would use the address and
    # ignore the interfaces.
    if address is not None and "HCCL_SOCKET_IFNAME" not in os.environ:
        os.environ.setdefault("HCCL_IF_IP", address)


def set_hccl_buffsize(mb: int) -> None:
    """Set the buffer size of all HCCL communicators whose options contain no buffer size.

    torch_npu reads the variable once, when this process creates its first communicator.
    """
    os.environ["HCCL_BUFFSIZE"] = str(mb)


def network_variables() -> dict[str, str]:
    """Return this process's environment variables that HCCL and Gloo read."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("HCCL_", "GLOO_"))
    }


def sourced_cann() -> Path | None:
    """Return the path of CANN from its set-up script; None if the script was not sourced."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return None


def sourced_parts() -> dict[str, Path | None]:
    """Return a mapping from the names of the parts of CANN that torch_npu requires to the parts'
    paths.

    CANN's set-up scripts set the paths. A path is None if no script has set it.
    """
    if (home := os.environ.get("ASCEND_HOME_PATH")) is None:
        return {}
    operators = os.environ.get("ASCEND_OPP_PATH")
    return {
        "ASCEND_HOME_PATH": Path(home),
        "ASCEND_OPP_PATH": None if operators is None else Path(operators),
        "runtime": Path(home, "runtime"),
        "compiler": Path(home, "compiler"),
    }


def cann_scripts() -> list[Path]:
    """Return the set-up scripts of the installed CANNs. The scripts of the CANN that root has
    installed come first, then the scripts of the CANN that the user has installed. If one CANN has
    two scripts, the script of the newer folder layout is first.
    """
    installed = os.environ.get("ASCEND_INSTALL_PATH")
    # A user other than root installs CANN in the home folder.
    own = Path(f"{os.environ.get('HOME', '')}/Ascend")
    roots = [Path(installed)] if installed else [ASCEND, own]
    folders = [root / folder for root in roots for folder in ("cann", "ascend-toolkit")]
    scripts = [folder / "set_env.sh" for folder in folders]
    return [script for script in scripts if script.is_file()]


def ascend_toolkit() -> Path:
    """Return the path that CANN's set-up script has set; CANN's default path if no script was
    sourced.
    """
    if sourced := sourced_cann():
        return sourced
    # From version 8.5 on, CANN is in cann/; older versions are in ascend-toolkit/latest/.
    folders = [script.parent for script in cann_scripts()]
    found = folders[0] if folders else ASCEND / "cann"
    return found / "latest" if found.name == "ascend-toolkit" else found


def prepare_device(config: DeviceConfig, *, is_npu: bool, deterministic: bool) -> None:
    """Set the variables that depend on this process's device, before torch_npu is loaded.

    If the user has set variables of the allocator, these variables keep their values.

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
    """Return the user's cache folder, for files that can be created again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dist-aclgraph"


def state_directory() -> Path:
    """Return the user's folder for files that describe what this package did, e.g. logs."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "dist-aclgraph"


def launch_blocking() -> bool:
    """Return whether ASCEND_LAUNCH_BLOCKING makes the host wait for the device at every launch."""
    return os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"


def binds_cores_itself() -> bool:
    """Return whether an environment variable makes torch_npu bind its threads to cores."""
    return os.environ.get("CPU_AFFINITY_CONF", "0")[:1] not in ("", "0")


def is_soft_partition() -> bool:
    """Return whether the NPU that this process has opened is a soft partition (eNPU).

    The library of soft partitions sets a variable with C's setenv, so ``os.environ`` does not show
    the variable.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return (getenv(b"ENPU_ENABLE") or b"").lower() == b"true"


def ray_address() -> str | None:
    """Return the value of RAY_ADDRESS, e.g. ``auto`` on a node of a cluster; None if not set."""
    return os.environ.get("RAY_ADDRESS") or None


def may_use_ray_token() -> bool:
    """Return false if the user's RAY_AUTH_MODE forbids tokens; Ray then starts without a token."""
    return os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"


def api_key() -> str | None:
    """Return the HTTP service's API key from the environment; None if there is no key."""
    return os.environ.get(API_KEY_VARIABLE) or None


def gcs_wait_s() -> float:
    """Return the time in seconds for which a cluster's nodes wait for an absent control store
    (GCS).

    Call this before ``prepare_ray_environment``, which changes the variable that this function
    reads.
    """
    return float(os.environ.get(GCS_WAIT_VARIABLE) or GCS_WAIT_S)


def prepare_ray_environment(*, is_local: bool, waits_for_gcs: bool = False) -> None:
    """Set Ray's variables whose defaults are unsuitable. Call this before Ray starts. Variables
    that the user has set keep their values.

    Args:
        is_local: whether this package starts Ray, or has started it. The settings of any other
            cluster are not changed.
        waits_for_gcs: whether calls to Ray wait while Ray's control store (GCS) does not answer, so
            that another process can restart the store. A waiting call does not report that Ray has
            died. This process must detect Ray's death in another way.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # After this number of seconds without the control store, Ray ends this process.
    os.environ.setdefault(GCS_WAIT_VARIABLE, "3600" if waits_for_gcs else "10")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_local:
        # A client of Ray can run any code, so Ray listens on loopback only. The value 0 of this
        # variable forbids clusters of several machines on every system, although the variable's
        # name lists only Windows and OSX. Ray also requires a token, unless the user has set
        # RAY_AUTH_MODE.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Time limit for the start of a worker process. The limit is long, because a worker may have
        # to wait for cores or for the fork server. This package has a separate limit for this wait.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
        # On a busy machine, Ray's agents need more than the default of 15 s to start. After the
        # default time, the node manager would abort.
        os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")
        # Disables Ray's memory monitor. If another program uses too much host memory, the monitor
        # would end actors of this package.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        # Disables Ray's task events, which no code reads. Every heartbeat is a task, so the events
        # would fill the memory of the control store and of the dashboard's agent.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # By default, the control store keeps the records of 100,000 actors that have ended.
        os.environ.setdefault("RAY_maximum_gcs_destroyed_actor_cached_count", "1000")
        os.environ.setdefault("RAY_maximum_gcs_dead_worker_cached_count", "1000")
        # Disables Ray's metrics. The dashboard's agent would keep the metrics of each process that
        # has ended. No program reads the metrics of a local Ray, because their port is random.
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        # With this period, a daemon that hangs is noticed after 12 to 42 s.
        os.environ.setdefault("RAY_health_check_period_ms", "2000")
        os.environ.setdefault("RAY_health_check_timeout_ms", "5000")
        os.environ.setdefault("RAY_health_check_failure_threshold", "6")


def disable_backend_autoload() -> None:
    """Stop torch from importing torch_npu before the emulator's libraries are loaded."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def visible_devices() -> tuple[int, ...] | None:
    """Return the physical NPU ids that this process may use; None if all may be used."""
    value = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if value is None:
        return None
    return tuple(int(part) for part in value.split(",") if part.strip())
