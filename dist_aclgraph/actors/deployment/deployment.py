"""Starts a deployment from a driver or an ingress, and keeps the deployment running."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.cluster.local_ray import CONTROLLER, ConnectedRay, start_ray
from dist_aclgraph.actors.cluster.ray_errors import ours
from dist_aclgraph.actors.controller.controller import Progress
from dist_aclgraph.actors.controller.term import Term
from dist_aclgraph.actors.deployment.controller_life import (
    ControllerKeeper,
    OnProgress,
    end_by_force,
    make_controller,
    progress_of,
)
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment
from dist_aclgraph.actors.host import run_directory
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.actors.wire.peers import PeersKey
from dist_aclgraph.actors.worker.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.decision import decide_device
from dist_aclgraph.environment import ray_address
from dist_aclgraph.errors import EngineDeadError, RayDiedError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.shapes.model_task import read_task
from dist_aclgraph.shapes.weight_files import check_weight_files
from dist_aclgraph.topology import NO_RANK

ANSWER_S, STOP_S = 10.0, 60.0  # seconds to wait for the controller's answers

# Errors that mean that the controller has not answered. The controller is dead or busy, or Ray
# cannot reach the controller, e.g. because the control store does not answer. ``ControllerKeeper``
# or ``ConnectedRay`` finds the reason.
UNKNOWN = (ActorDiedError, ActorUnavailableError, GetTimeoutError)


class RayDeployment(Deployment):
    """A deployment whose processes are actors of Ray.

    Owns the ``ControllerKeeper`` of the deployment. Also owns the connection to Ray if this process
    made the connection for this deployment.

    Args:
        connected: the Ray to which this process connected for this deployment; None if this process
            was connected to Ray before.
    """

    def __init__(
        self,
        keeper: ControllerKeeper,
        connected: ConnectedRay | None = None,
    ) -> None:
        self._keeper = keeper
        self._is_shut_down = False
        self._connected = connected
        self.node_id = ray.get_runtime_context().get_node_id()

    @property
    def _controller(self) -> Any:
        return self._keeper.controller

    def reach(self) -> Reach:
        """Return the addresses at which clients reach the deployment now.

        Raises:
            EngineDeadError: the deployment does not serve.
        """
        try:
            found: Reach = ray.get(self._controller.reach.remote(), timeout=ANSWER_S)
        except RayError as e:
            raise EngineDeadError(str(ours(e, "asking for the groups"))) from e
        return found

    def report(self) -> dict[str, Any]:
        """Return the plan, the buckets with their counters, the number of eager steps for each
        reason, and the ranks with their memory.
        """
        try:
            return dict(ray.get(self._controller.report.remote(), timeout=2 * ANSWER_S))
        except RayError as e:
            raise ours(e, "asking for a report") from e

    def raise_if_dead(self) -> None:
        """Raise an error if the deployment has ended.

        Raises:
            RayDiedError: Ray has died or hangs.
            EngineDeadError: the deployment will not serve again; the message says why.
        """
        # A known end is reported before Ray is called, because calls to Ray hang if Ray's control
        # store is dead.
        self._raise_end()
        if self._connected is not None:
            self._connected.look()
            self._raise_end()
        if self._keeper.progress:
            return
        try:
            failure = ray.get(self._controller.failure.remote(), timeout=ANSWER_S)
        except UNKNOWN:
            return
        except RayError as e:
            self._raise_end()
            raise EngineDeadError(str(ours(e, "asking the controller"))) from e
        if failure:
            raise EngineDeadError(failure)

    def outlook(self) -> Outlook:
        """Return the deployment's status, for clients that know no serving group.

        Raises:
            EngineDeadError: the deployment has ended.
        """
        self._raise_end()
        if progress := self._keeper.progress:
            return Outlook(progress=progress)
        try:
            found: Outlook = ray.get(self._controller.outlook.remote(), timeout=ANSWER_S)
        except UNKNOWN:
            return Outlook(progress="the controller does not answer")
        except RayError as e:
            self._raise_end()
            raise EngineDeadError(str(ours(e, "asking for the groups"))) from e
        return found

    def restarts_left(self) -> int:
        """Return how many lost controllers may still be replaced within this hour."""
        return self._keeper.restarts_left

    def _raise_end(self) -> None:
        if self._connected is not None and self._connected.death:
            raise RayDiedError(self._connected.death)
        if self._is_shut_down:
            raise EngineDeadError("the deployment was shut down")
        if self._keeper.failure:
            raise EngineDeadError(self._keeper.failure)

    def scale(self, count: int) -> None:
        """Change the number of groups that accept requests; the other groups continue to serve.

        Raises:
            DistAclGraphError: the change failed; all groups that served continue to serve.
        """
        fetch(self._controller.scale.remote(count), NO_RANK, "SERVING")

    def roll(self, config: Config) -> None:
        """Replace all groups by groups with another configuration. No request fails because of the
        roll.

        Raises:
            DistAclGraphError: the change failed; all groups that served continue to serve.
        """
        check_startable(config)
        fetch(self._controller.roll.remote(config), NO_RANK, "SERVING")

    def shut_down(self) -> None:
        """Stop everything that was started. Safe to call twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        controller = self._keeper.stop()
        if self._connected is None or not self._connected.death:
            with suppress(RayError):  # The controller and its actors may have ended already.
                ray.get(controller.shut_down.remote(), timeout=STOP_S)
            self._keeper.end_by_force()
        _leave(self._connected)


def check_startable(config: Config) -> None:
    """Check the model's files and the build of torch, before anything is started.

    Raises:
        ConfigError, ModelError: the model, or its combination with ``config``, is not supported.
        DeviceError: torch is built for CUDA.
    """
    Planner.from_config(config)
    if config.weights == "checkpoint":
        check_weight_files(config.model)
    read_task(config)
    emulator.check_torch()


def start(
    config: Config,
    on_progress: OnProgress | None = None,
    starter: ProcessStarter | None = None,
    *,
    waits_for_ray: bool = False,
) -> RayDeployment:
    """Start a deployment on this process's Ray cluster. If there is none, call ``start_ray``.

    Errors in the model's files are raised before any process is started.

    Args:
        starter: starts processes; used only if this process has started Ray, or starts Ray now.
        waits_for_ray: whether to wait until the cluster at RAY_ADDRESS answers.

    Raises:
        ConfigError, ModelError: the model, or its combination with ``config``, is not supported.
        DeviceError: torch is built for CUDA, or this machine does not have the configured device.
        RayDiedError: the Ray that was started for the deployment has died.
        DistAclGraphError: any other error; if a worker failed, the message names rank and phase.
            After an error, no process of the deployment runs.
    """
    tell = on_progress or (lambda progress: None)
    check_startable(config)
    PeersKey.read(config)  # an unusable key file must be reported before any process starts
    owns_connection = not ray.is_initialized()
    # Only a local Ray uses the devices of this node. In an existing cluster, this node may have no
    # device. There, each worker checks its own device.
    is_local = owns_connection and ray_address() is None
    config = decide_device(config, "here" if is_local else "cluster")
    if is_local and config.device.kind == "emulated":
        emulator.build(lambda done, steps, _: tell(Progress("BUILDING", done, steps)))
    if starter is None and is_local:
        starter = choose_starter(config)
    if owns_connection:
        tell(Progress("STARTING_RAY" if is_local else "JOINING_RAY"))
    try:
        if starter is not None:
            # A fork server starts here, and loads libraries while Ray starts.
            starter.command(config)
        connected = start_ray(config, starter, waits=waits_for_ray) if owns_connection else None
    except BaseException:
        if starter is not None:
            starter.close()
        raise
    if connected is not None:
        connected.watch()
    controller, name = None, f"{CONTROLLER}-{secrets.token_hex(4)}"
    try:
        tell(Progress("STARTING_CONTROLLER"))
        term = Term(0, secrets.token_hex(16))
        controller = make_controller(config, name, term, starter)
        reach = _wait_for(controller, connected, tell)
    except BaseException as e:
        if controller is not None and (connected is None or not connected.death):
            end_by_force(controller, name)
        _leave(connected)
        if connected is not None and connected.death:
            raise RayDiedError(connected.death) from e
        if isinstance(e, RayError):
            raise ours(e, "starting the deployment") from e
        raise

    def has_ray() -> bool:
        return connected is None or not connected.death

    keeper = ControllerKeeper(controller, name, config, reach, has_ray, starter)
    return RayDeployment(keeper, connected)


def _wait_for(controller: Any, connected: ConnectedRay | None, tell: OnProgress) -> Reach:
    starting = controller.start.remote()
    for progress in progress_of(controller, starting):
        if connected is not None and connected.death:
            raise RayDiedError(connected.death)
        if progress is not None:
            tell(progress)
    reach: Reach = fetch(starting, NO_RANK, "PLACING")
    return reach


def _leave(connected: ConnectedRay | None) -> None:
    if connected is not None:
        connected.stop()
        run_directory.sweep()  # ``sweep`` removes the directories of killed engines
