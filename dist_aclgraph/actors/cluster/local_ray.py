"""Joins an existing Ray cluster, or starts Ray on this machine.

A Ray that this module starts serves this machine only. Such a Ray listens on loopback and requires
a token. Signals to the process group of Ray's driver do not reach this Ray. If one of Ray's daemons
dies, calls to Ray can hang forever. So the process that started Ray watches the daemons, and can
kill all processes of this Ray.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.authentication.authentication_token_setup import (
    _get_default_token_path,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import find_gcs_addresses
from ray._raylet import AuthenticationTokenLoader, GcsClient, NodeID  # type: ignore[attr-defined]
from ray.exceptions import RpcError

from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.cluster.ray_errors import ours, ray_logs
from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.liveness import Silence, watch_processes
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.kind import resolve_kind
from dist_aclgraph.environment import (
    RAYLET_VARIABLE,
    gcs_wait_s,
    may_use_ray_token,
    prepare_ray_environment,
    ray_address,
)
from dist_aclgraph.errors import PlacementError

NAMESPACE = "dist_aclgraph"
CONTROLLER = "controller"  # a controller's name is this word and eight random hexadecimal digits
NPUS_OF_A_NODE = 8
# The control plane needs no object store memory, but Ray refuses less than 75 MiB.
OBJECT_STORE_BYTES = 100 << 20
RAYLET = "raylet"
# TOO_SLOW identifies Ray's error for a start that took too long.
START_ATTEMPTS, TOO_SLOW = 5, "timed out during startup"
KILL_ROUNDS, KILL_PAUSE_S = 5, 0.2
CONNECT_S, ASK_S, RETRY_S = 10.0, 5.0, 1.0
LOCAL_SILENT_S = 30.0
# A raylet exits after the control store has been silent for a certain time. A process that cannot
# watch the raylet waits for that time plus this number of seconds.
RAYLET_ENDS_S = 30.0
DAEMONS = {"gcs_server": "Ray's control store (GCS)", RAYLET: "Ray's node manager (raylet)"}

logger = logging.getLogger(__name__)


class ConnectedRay:
    """The Ray to which this process is connected. This object notices when Ray dies.

    The death of a daemon is noticed at once. A daemon that hangs is noticed after ``silent_s``.

    Args:
        silent_s: if Ray's control store is silent for this number of seconds, Ray counts as dead.
            ``math.inf`` allows any silence.
        daemons: maps the process id of each of Ray's daemons on this machine to the daemon's name.
        clock: monotonic, in seconds.

    Attributes:
        death: a sentence that says why Ray counts as dead; "" while Ray works.
    """

    def __init__(
        self,
        silent_s: float,
        daemons: dict[int, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.death = ""
        self._daemons = daemons
        self._stopped = threading.Event()
        # If Ray is silent, each check lasts until its timeout (ASK_S). Then a pause of a second
        # follows.
        self._silence = Silence(silent_s, clock, every_s=ASK_S + RETRY_S)
        self._node_id = NodeID.from_hex(ray.get_runtime_context().get_node_id())

    def watch(self) -> None:
        """Start a thread that watches the daemons, and that calls ``_end`` when the first daemon
        dies.
        """
        names = {pid: DAEMONS[name] for pid, name in self._daemons.items() if name in DAEMONS}

        def tell(name: str) -> None:
            self.death = f"{name} has died; see {ray_logs()}"
            self._end()

        watch_processes(names, tell, self._stopped)

    def unwatch(self) -> None:
        """Stop the watch before the daemons are ended on purpose."""
        self._stopped.set()

    def _end(self) -> None:
        """React to the death of a daemon. Does nothing here, because another process started this
        Ray.
        """

    def look(self) -> None:
        """Ask Ray's control store whether this node's raylet answers. Wait at most ``ASK_S``."""
        try:
            [is_alive] = ray_worker.global_worker.gcs_client.check_alive(
                [self._node_id], timeout=ASK_S
            )
        except RpcError:
            if self._silence.listen():
                limit = f"{self._silence.limit_s:g} s"
                silence = f"Ray's control store (GCS) has not answered for {limit}"
                self.death = f"{silence}; see {ray_logs()}"
            return
        self._silence.heard()
        if not is_alive:
            self.death = f"Ray's node manager (raylet) does not answer; see {ray_logs()}"

    def stop(self) -> None:
        self.unwatch()
        leave_ray()


class LocalRay(ConnectedRay):
    """A Ray that this process has started.

    Owns the processes of this Ray, and the ``ProcessStarter`` that starts Ray's workers.

    Args:
        daemons: maps the process id of each of Ray's daemons to the daemon's name.
    """

    def __init__(self, daemons: dict[int, str], starter: ProcessStarter) -> None:
        super().__init__(LOCAL_SILENT_S, daemons)
        self._starter = starter
        raylets = [pid for pid, name in daemons.items() if name == RAYLET]
        self._raylets = raylets
        # The agents of a raylet run for up to a minute after the raylet's end. After the raylet's
        # end, nothing shows to which raylet an agent belonged. So handles of the agents are opened
        # now, while the raylet runs.
        agents = set().union(*map(processes.children, raylets))
        self._handles = processes.open_handles(agents | set(daemons))

    def _end(self) -> None:
        """Kill all processes of this Ray. Otherwise the surviving daemons would keep engines
        running.

        The clients of these engines notice the end of the processes at once.
        """
        self.kill()

    def kill(self) -> None:
        """Kill all processes of this Ray at once, including processes that SIGSTOP has stopped."""
        self.unwatch()
        processes.kill_handles(self._handles)
        for _ in range(KILL_ROUNDS):  # new processes can start while others are killed
            processes.kill_all(self._workers())
            time.sleep(KILL_PAUSE_S)
        self._starter.end_started()

    def stop(self) -> None:
        """Stop this Ray gracefully; if a daemon has died, kill Ray."""
        self.unwatch()
        if self.death:
            self.kill()
        leave_ray()
        processes.kill_handles(self._handles)
        self._starter.end_started()
        self._starter.close()

    def _workers(self) -> set[int]:
        found = [processes.with_variable(RAYLET_VARIABLE, str(pid)) for pid in self._raylets]
        return set().union(*found)


def start_ray(
    config: Config, starter: ProcessStarter | None = None, *, waits: bool = False
) -> ConnectedRay:
    """Join the Ray cluster that RAY_ADDRESS names; without RAY_ADDRESS, start Ray on this machine.

    If NPUs are emulated, a local Ray declares ``NPUS_OF_A_NODE`` NPUs, or more if the configuration
    needs more.

    Args:
        starter: starts the processes of a local Ray. The returned object owns the starter.
        waits: whether to wait until the cluster at RAY_ADDRESS answers.

    Raises:
        PlacementError: no Ray can be joined or started; the message says what to do.
    """
    address, nodes_wait_s = ray_address(), gcs_wait_s()
    prepare_ray_environment(is_local=address is None, waits_for_gcs=address is not None)
    if address is None and ray_constants.ENABLE_RAY_CLUSTER:
        # ``ray_constants`` was imported before ``prepare_ray_environment`` set the environment
        # variables. The module is loaded again, so that it computes its constants from these
        # variables.
        importlib.reload(ray_constants)
    try:
        if address is not None:
            _join(address, waits=waits)
            return joined(_raylet_of_this_node(), nodes_wait_s)
        is_emulated = resolve_kind(config.device.kind) == "emulated"
        # The node declares more NPUs than most deployments need, so that this process can start a
        # second deployment in the same Ray.
        num_npus = max(NPUS_OF_A_NODE, config.parallel.world_size)
        acl = _emulated_acl() if is_emulated else nullcontext()
        starter = starter or choose_starter(config)
        protect_token()
        with own_process_group(), starter.ray_settings() as settings, acl:
            started = start_daemons(
                num_cpus=max(4, os.cpu_count() or 1),
                resources={"NPU": num_npus} if is_emulated else None,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _system_config=settings,
            )
        return LocalRay({pid: processes.name_of(pid) for pid in started}, starter)
    except Exception as e:
        raise ours(e, "starting Ray" if address is None else f"joining Ray at {address}") from e


def _join(address: str, *, waits: bool) -> None:
    """Connect to a cluster. If ``waits`` is True, try again until the cluster answers."""
    while True:
        try:
            return _init(address)
        except ConnectionError:
            if not waits:
                raise
        time.sleep(RETRY_S)


def joined(
    raylet: int | None, nodes_wait_s: float, clock: Callable[[], float] = time.monotonic
) -> ConnectedRay:
    """Return the connection to a cluster that another process has started.

    Steps do not need the control store. So a service continues while the control store is silent.
    If the control store is silent for too long, the raylet exits. Then Ray counts as dead.

    Args:
        raylet: process id of this node's raylet; None if this process cannot watch the raylet.
        nodes_wait_s: seconds that the cluster's nodes wait for the control store.
    """
    if raylet is not None:
        return ConnectedRay(math.inf, {raylet: RAYLET}, clock)
    return ConnectedRay(nodes_wait_s + RAYLET_ENDS_S, {}, clock)


def _raylet_of_this_node() -> int | None:
    """Return this node's raylet's process id; None if the raylet is in another PID namespace."""
    node = ray_worker.global_worker.node
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(node.raylet_socket_name)
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None


def protect_token() -> None:
    """Create Ray's token file so that only this user can read the file. A process that knows the
    token can run any code in this Ray.

    If Ray created the file, the umask would decide whether other users can read it.
    """
    path = _get_default_token_path()
    with suppress(FileNotFoundError):
        state = path.stat()
        if state.st_uid == os.getuid() and state.st_mode & 0o077:
            path.chmod(0o600)
            logger.warning("other users could read Ray's token %s; its mode is 0600 now", path)
    loader = AuthenticationTokenLoader.instance()
    if not may_use_ray_token() or loader.has_token(ignore_auth_mode=True):
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another process has just created the file
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(generate_new_authentication_token())
    loader.reset_cache()


def start_daemons(**options: Any) -> set[int]:
    """Start Ray on this machine; try again if the start takes longer than Ray's limit of 30 s.

    Args:
        options: options of ``ray.init``.

    Returns:
        The process ids of Ray's daemons.
    """
    before = processes.children(os.getpid())
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _init("local", **options)
            break
        except BaseException as e:
            started = processes.children(os.getpid()) - before
            agents = set().union(*map(processes.children, started))
            handles = processes.open_handles(started | agents)
            ray.shutdown()
            processes.kill_handles(handles)
            if TOO_SLOW not in str(e) or attempt == START_ATTEMPTS:
                raise
            logger.warning("Ray took too long to start, and is started again")
    return processes.children(os.getpid()) - before


def join_ray(local_address: str | None) -> None:
    """Join the Ray cluster at ``local_address``. By default, join the cluster that RAY_ADDRESS
    names; without RAY_ADDRESS, join the only Ray on this machine.

    Args:
        local_address: address of the service's Ray. If given, RAY_ADDRESS is ignored.

    Raises:
        PlacementError: there is no cluster, or more than one; the message says what to do.
    """
    is_local = local_address is not None or ray_address() is None
    prepare_ray_environment(is_local=is_local)
    address = local_address or ray_address() or _only_ray()
    if is_local:
        # The Ray of a service listens on loopback, and requires this user's token.
        if ray_constants.ENABLE_RAY_CLUSTER:
            importlib.reload(ray_constants)
        # The level is set here, because Ray logs its first messages before ``_init`` sets the
        # level.
        logging.getLogger("ray").setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        _init(address)
    except Exception as e:
        raise ours(e, f"joining Ray at {address}") from e


@contextmanager
def joined_ray(local_address: str | None) -> Iterator[None]:
    """Join a Ray cluster, and leave it at the end of the context; see ``join_ray``. Do nothing if
    this process is already connected to a cluster.
    """
    owns_connection = not ray.is_initialized()
    if owns_connection:
        join_ray(local_address)
    try:
        yield
    finally:
        if owns_connection:
            leave_ray()


def leave_ray() -> None:
    ray.shutdown()
    ray_worker._worker_logs_enabled = True


def _only_ray() -> str:
    """Return "auto", the address by which Ray finds the only Ray on this machine.

    Raises:
        PlacementError: several Rays run on this machine. Ray would choose one of them arbitrarily.
    """
    found = sorted(find_gcs_addresses())
    if len(found) > 1:
        raise PlacementError(
            f"{len(found)} Rays run on this machine: {', '.join(found)}; say which is meant by "
            "--ray, as its service has printed it, or by RAY_ADDRESS"
        )
    return "auto"


def _check_listener(address: str) -> None:
    """Check that a Ray listens at ``HOST:PORT`` and accepts this process's token.

    Raises:
        ConnectionError: no process listens, or the process that listens is no Ray. Without this
            check, Ray would end this process without an exception.
        AuthenticationError: the token is wrong or missing. Without this check, Ray would try for 30
            seconds, and then report that no process answers.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "://" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as e:
        raise ConnectionError(str(e)) from e
    try:
        GcsClient(address=address)
    except RpcError as e:
        raise ConnectionError(str(e)) from e


def _init(address: str, **options: Any) -> None:
    _check_listener(address)
    # Ray prints errors of all its processes on stdout, but stdout is for the caller's results.
    ray_worker._worker_logs_enabled = False
    # Ray's messages about daemons and retries mean nothing to a user who runs a model.
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Lines of Ray's logger may be written to our log. So Ray must not change the format of these
    # lines.
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        **options,
    )


@contextmanager
def own_process_group() -> Iterator[None]:
    """Move this process to a new process group until the context ends. New child processes inherit
    this group.

    ``timeout``, a shell or a supervisor sends signals to whole groups. Without this function, such
    a signal would also end Ray's daemons, and the driver could not stop gracefully.

    The leader of a group cannot leave the group. If this process is the leader, this function does
    nothing. If this process was the only member of its old group, the old group ends. Then this
    process stays in the new group.
    """
    group = os.getpgrp()
    if group == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpgid(0, group)


@contextmanager
def _emulated_acl() -> Iterator[None]:
    """Let Ray find the emulator's ``acl`` module while Ray counts this node's NPUs."""
    folder = str(emulator.SOURCES / "python")
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
