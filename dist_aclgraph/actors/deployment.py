"""Starting a deployment from a driver or an ingress, and holding on to it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.controller import Controller, Progress, Service
from dist_aclgraph.actors.process_group import own_process_group
from dist_aclgraph.actors.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.kind import resolve_kind
from dist_aclgraph.environment import prepare_ray_environment, ray_address
from dist_aclgraph.errors import EngineDeadError

NAMESPACE = "dist_aclgraph"
CONTROLLER = "controller"  # first part of the names of controller actors
NPUS_OF_A_NODE = 8
OBJECT_STORE_BYTES = 100 << 20  # the control plane needs none; this is what Ray accepts gladly
POLL_S = 0.1

OnProgress = Callable[[Progress], None]


class Deployment:
    """A serving deployment.

    Owns its controller, and the local Ray cluster where it had to start one.
    """

    def __init__(self, controller: Any, service: Service, *, owns_ray: bool) -> None:
        self._controller = controller
        self._owns_ray = owns_ray
        self.addresses = service.addresses
        self.token = service.token
        self.max_model_len = service.max_model_len

    def report(self) -> dict[str, Any]:
        """Return plan, buckets with their counters, eager steps by reason, ranks and memory."""
        return dict(ray.get(self._controller.report.remote(), timeout=15.0))

    def check(self) -> None:
        """Return if the deployment serves.

        Raises:
            EngineDeadError: it does not; says why.
        """
        try:
            failure = ray.get(self._controller.check.remote(), timeout=10.0)
        except RayError as e:
            raise EngineDeadError(f"the controller is gone: {type(e).__name__}") from e
        if failure:
            raise EngineDeadError(failure)

    def shut_down(self) -> None:
        """Stop all that was started. Safe to call twice."""
        if self._controller is None:
            return
        controller, self._controller = self._controller, None
        try:
            ray.get(controller.shut_down.remote(), timeout=60.0)
            ray.kill(controller)
        except RayError:
            pass  # It is gone already, and its actors with it.
        if self._owns_ray:
            ray.shutdown()


def start(config: Config, on_progress: OnProgress | None = None) -> Deployment:
    """Bring a deployment up, on this process's Ray cluster, or as ``start_ray`` finds one.

    Raises:
        DistAclGraphError: typed, naming rank and phase where a worker failed; nothing is left.
    """
    is_emulated = resolve_kind(config.device.kind) == "emulated"
    if is_emulated:
        emulator.build()
    owns_ray = not ray.is_initialized()
    if owns_ray:
        start_ray(config)
    controller = None
    try:
        actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Controller)
        controller = actor.options(
            name=f"{CONTROLLER}-{secrets.token_hex(4)}", namespace=NAMESPACE
        ).remote(config, is_emulated=is_emulated)
        starting = controller.start.remote()
        while not ray.wait([starting], timeout=POLL_S)[0]:
            if on_progress is not None:
                on_progress(ray.get(controller.progress.remote(), timeout=10.0))
        service = fetch(starting, -1, "PLACING")
    except BaseException:
        if controller is not None:
            ray.kill(controller)
        if owns_ray:
            ray.shutdown()
        raise
    return Deployment(controller, service, owns_ray=owns_ray)


def start_ray(config: Config) -> None:
    """Join the Ray cluster that RAY_ADDRESS names, else start Ray on this machine alone.

    A local Ray declares a node's NPUs, or as many as are needed, where they are emulated.
    """
    prepare_ray_environment()
    common = {"namespace": NAMESPACE, "log_to_driver": False}
    if (address := ray_address()) is not None:
        ray.init(address=address, **common)
        return
    is_emulated = resolve_kind(config.device.kind) == "emulated"
    # As many as a node has, so that a second deployment of this process finds some.
    num_npus = max(NPUS_OF_A_NODE, config.parallel.world_size)
    with own_process_group(), _emulated_acl() if is_emulated else nullcontext():
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            resources={"NPU": num_npus} if is_emulated else None,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **common,
        )


@contextmanager
def _emulated_acl() -> Iterator[None]:
    """Let Ray find the emulator's ``acl`` module while it counts this node's NPUs."""
    folder = str(emulator.SOURCES / "python")
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
