"""The driver checks that the controller answers, and replaces a dead controller.

When a controller dies, Ray ends all actors that the controller has started. So the next controller
starts the same number of new groups, with the latest configuration. The requests of the lost groups
wait in the clients until a group serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.local_ray import NAMESPACE
from dist_aclgraph.actors.controller.controller import Controller, Progress
from dist_aclgraph.actors.controller.term import Handover, Term
from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.liveness import Silence, beat_s
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.actors.worker.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.logs import event
from dist_aclgraph.planning.restarts import RestartBudget
from dist_aclgraph.topology import NO_RANK, ParallelLayout

POLL_S = 0.1
LOOK_S = 1.0
JOIN_S = 5.0  # seconds to wait for the end of the keeper's thread
NAME_S = 30.0  # seconds that Ray might need to free the name of a dead controller
LEASES = 2  # a controller that is silent for LEASES * ``timeouts.link_s`` counts as dead

logger = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]


def make_controller(
    config: Config, name: str, term: Term, starter: ProcessStarter | None = None
) -> Any:
    """Start a controller's process on this node, so that the death of another node cannot end the
    process.

    Args:
        starter: starts the controller and its workers. If another process has started the cluster,
            ``starter`` is None. In this case Ray starts the controller, and the controller chooses
            a starter for its workers.

    Raises:
        RayError: the process cannot be started.
        ValueError: the name is in use.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=8)(Controller)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": name, "namespace": NAMESPACE, "scheduling_strategy": here}
    if starter is not None and (command := starter.command(config)) is not None:
        options["runtime_env"] = {"py_executable": command}
    return actor.options(**options).remote(config, name, term, starter)


def end_by_force(controller: Any, name: str) -> None:
    """Kill a controller, and free the NPUs of its deployment."""
    with suppress(RayError):
        ray.kill(controller)
        placement.release_all(name)


def progress_of(controller: Any, work: Any) -> Iterator[Progress | None]:
    """Yield the controller's progress again and again until ``work`` is done. Yield None while the
    progress is unknown.

    A late answer of the controller is no failure, because the controller's process can start slowly
    on a busy machine. ``work`` is a call to the controller. The call has time limits, and ends with
    an error if the controller dies.
    """
    asked = None
    while not ray.wait([work], timeout=POLL_S)[0]:
        progress, asked = None, asked or controller.progress.remote()
        if ray.wait([asked], timeout=POLL_S)[0]:
            with suppress(RayError):
                progress = ray.get(asked)
            asked = None
        yield progress


class ControllerKeeper:
    """Owns a deployment's controller from the time when the deployment begins to serve.

    Args:
        controller: the first controller, which serves.
        name: name of the deployment, and of all its controllers.
        has_ray: a function that returns whether Ray still runs. Without Ray, no controller can be
            started.
        starter: starts controllers and their workers; see ``make_controller``.
        make: a function that starts a controller's process; see ``make_controller``.

    Attributes:
        controller: the current controller; it might be dead already.
        progress: a text about the start of the next controller; "" while no controller is being
            started.
        failure: why the keeper has given up starting controllers; "" while the keeper may start
            another controller.
    """

    def __init__(
        self,
        controller: Any,
        name: str,
        config: Config,
        reach: Reach,
        has_ray: Callable[[], bool] = lambda: True,
        starter: ProcessStarter | None = None,
        make: Callable[[Config, str, Term, ProcessStarter | None], Any] = make_controller,
    ) -> None:
        self.controller = controller
        self._make_controller = make
        self._has_ray = has_ray
        self._starter = starter
        self.progress = ""
        self.failure = ""
        self._name = name
        self._process = self._open_handles()
        num_groups = len(ParallelLayout.from_config(config.parallel).lockstep_groups)
        self._handover = Handover(config, num_groups)
        self._term = Term(0, reach.token, reach.max_model_len)
        self._silence = Silence(LEASES * config.timeouts.link_s)
        self._restarts = RestartBudget(config.recovery.restarts_per_hour)
        # The creation of a controller and ``stop`` exclude each other. So no controller is created
        # after ``stop``.
        self._making = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller-keeper", daemon=True)
        self._thread.start()

    @property
    def restarts_left(self) -> int:
        """How many more controllers may be started within this hour. Any thread may read this
        value.
        """
        return self._restarts.num_left(time.monotonic())

    def stop(self) -> Any:
        """Stop the checks, start no other controller, and return the last controller."""
        with self._making:
            self._stopping.set()
        self._thread.join(JOIN_S)  # after ray.shutdown(), a call of the thread would start a Ray
        return self.controller

    def end_by_force(self) -> None:
        """Kill the last controller, and free the NPUs of its deployment."""
        end_by_force(self.controller, self._name)
        # Ray can only ask a forked process to end. A process that SIGSTOP has stopped does not
        # react to this request.
        processes.kill_handles(self._process)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S) and not self.failure:
            try:
                death = self._look()
                if death and self._has_ray():  # without Ray, the calls of ``_replace`` would hang
                    self._replace(death)
            except RayError as e:  # Ray itself has failed; ``ConnectedRay`` notices this
                logger.debug("asking the controller failed: %s", e)
            except Exception:  # catch any exception, because the next check can succeed
                logger.exception("looking after the controller failed")

    def _look(self) -> str:
        """Ask the controller for its handover. Return why the controller counts as dead; "" if the
        controller lives.
        """
        asked = self.controller.handover.remote()
        self._silence.heard()
        while not ray.wait([asked], timeout=beat_s(self._silence.limit_s))[0]:
            if self._stopping.is_set():
                return ""
            if self._silence.listen():
                return f"the controller has not answered for {self._silence.limit_s:g} s"
        try:
            self._handover = ray.get(asked)
        except ActorDiedError:
            return "the controller has died"
        return ""

    def _replace(self, death: str) -> None:
        """Start controllers until one serves, as long as the restart budget allows more starts."""
        event(logger, "controller_lost", logging.ERROR, cause=death)
        lost_s = time.monotonic()
        self.progress = death
        while not self._stopping.is_set():
            if not self._restarts.spend(time.monotonic()):
                allowed = f"recovery.restarts_per_hour allows {self._restarts.per_hour}"
                self.failure = f"{death}; it is not started again: {allowed}"
                event(logger, "controller_given_up", logging.ERROR, cause=self.failure)
                return
            try:
                self._start_another()
            # Catch any exception and try again; the restart budget limits the number of attempts.
            except Exception as e:
                event(logger, "controller_start_failed", logging.ERROR, cause=str(e))
                death = f"{death}, and starting another failed: {e}"
                self._restarts.failed(time.monotonic())
                while not self._restarts.is_due(time.monotonic()):
                    if self._stopping.wait(POLL_S):
                        return
            else:
                self._restarts.succeeded()
                event(logger, "controller_replaced", seconds=time.monotonic() - lost_s)
                self.progress = ""
                return

    def _start_another(self) -> None:
        self.end_by_force()
        self._term = self._term.next(self._handover)
        self._make()
        if self._stopping.is_set():
            return
        starting = self.controller.start.remote()
        for progress in progress_of(self.controller, starting):
            if self._stopping.is_set():
                return
            self.progress = f"another controller: {progress or 'PLACING'}"
        fetch(starting, NO_RANK, "PLACING")
        self._process = self._open_handles()

    def _make(self) -> None:
        """Start a controller under the same name, as soon as Ray has freed this name."""
        deadline_s = time.monotonic() + NAME_S
        while True:
            with self._making:
                if self._stopping.is_set():
                    return
                try:
                    config = self._handover.config
                    self.controller = self._make_controller(
                        config, self._name, self._term, self._starter
                    )
                    return
                except ValueError:
                    if time.monotonic() > deadline_s:
                        raise
            time.sleep(POLL_S)

    def _open_handles(self) -> list[int]:
        """Return handles (pidfds) that can kill the controller's process if Ray cannot."""
        if self._starter is not None:
            with suppress(RayError):  # the controller is dead already
                pid = ray.get(self.controller.pid.remote(), timeout=JOIN_S)
                return self._starter.open_handles(pid)
        return []
