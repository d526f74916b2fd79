"""The controller actor: starts a deployment from its configuration, and ends the deployment.

A deployment's states are PLACING, JOINING, LOADING, NEGOTIATING, CAPTURING, SERVING, DRAINING,
STOPPED (``state.py``). A failure before SERVING stops the whole deployment gracefully
(``startup.py``). A later failure stops only the lockstep group that failed (``group_watch.py``). If
all groups are lost, the deployment is RECOVERING as long as groups may be started again
(``upkeep.py``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.cluster.ray_errors import ours, ray_logs
from dist_aclgraph.actors.cluster.spares import Spares
from dist_aclgraph.actors.controller.group_calls import stop_groups
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.controller.serving_groups import ServingGroups, ranks_of_groups
from dist_aclgraph.actors.controller.startup import Startup
from dist_aclgraph.actors.controller.state import State, advance
from dist_aclgraph.actors.controller.term import Handover, Term
from dist_aclgraph.actors.controller.upkeep import Upkeep
from dist_aclgraph.actors.host.liveness import leave_with_raylet
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.actors.worker.worker_group import bundles_of_groups
from dist_aclgraph.config import Config
from dist_aclgraph.errors import DistAclGraphError, EngineUnavailableError, WorkerError
from dist_aclgraph.files.log_folder import folder_path, with_log_folder
from dist_aclgraph.logs import ProcessLog, event
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit

logger = logging.getLogger(__name__)

REPORT_S = 10.0  # seconds to wait for the reports of engines
NOT_STOPPED = frozenset(State) - {State.STOPPED}
BYTES = "bytes"


@dataclass(frozen=True)
class Progress:
    """The progress of a start or a drain. ``done`` and ``total`` count bytes if ``detail`` is
    ``BYTES``.
    """

    state: str
    done: int = 0
    total: int = 0
    detail: str = ""
    part: str = ""  # the current part of a change that has several parts, e.g. "group 2 of 3"

    def __str__(self) -> str:
        return f"{self.state} {self.done:,} of {self.total:,}" if self.total else self.state


class Controller:
    """Owns the plan, the states, and all actors of a deployment.

    Args:
        name: name of the deployment; the names of its placement groups begin with this name.
        starter: starts the deployment's workers. If None, this process chooses a starter
            (``choose_starter``).
    """

    def __init__(
        self, config: Config, name: str, term: Term, starter: ProcessStarter | None = None
    ) -> None:
        leave_with_raylet()
        self._name = name
        self._config = config = with_log_folder(config)
        ProcessLog("controller").open(config.logging)
        event(logger, "controller_started", deployment=name, number=term.number, pid=os.getpid())
        self._term = term
        self._spares = Spares(name, config.recovery.spares)
        self._starter = starter or choose_starter(config)
        self._start_limit = StartLimit(term.slowest_start_s)
        self._entering = threading.Lock()
        self._state = State.PLACING
        self._entered_s = time.monotonic()
        self._progress = Progress(self._state.value)
        self._failure = ""  # why the start failed
        self._groups: list[LockstepGroup] = []
        self._serving: ServingGroups | None = None
        self._upkeep: Upkeep | None = None

    # ---- methods that also answer while start() or a change runs

    def progress(self) -> Progress:
        """Return the progress of the deployment's start, or of the current change of groups."""
        part = "" if self._serving is None else self._serving.part
        found = replace(self._progress, part=part)
        if found.state == State.LOADING.value:
            groups = self._groups if self._serving is None else list(self._serving.starting)
            reports = [p for group in groups for p in group.workers.progress()]
            done, total = (sum(r["progress"][i] for r in reports) for i in range(2))
            return Progress(found.state, done, total, BYTES, part)
        return found

    def pid(self) -> int:
        return os.getpid()

    def failure(self) -> str:
        """Return why service has ended for good; "" if a group serves or may serve later."""
        return self._failure if self._upkeep is None else self._upkeep.failure

    def handover(self) -> Handover:
        """Return the values that a new controller would need. An answer also shows the caller that
        this controller is alive.
        """
        slowest_s = self._start_limit.slowest_s
        if self._serving is None:
            return Handover(self._config, self._term.num_groups, slowest_s)
        return Handover(self._serving.config, self._serving.num_wanted, slowest_s)

    def outlook(self) -> Outlook:
        """Return the state of the deployment, for clients that know no serving group."""
        serving = self._open_groups(State.RECOVERING)
        progress = str(self.progress())
        if self._upkeep is not None and self._upkeep.trouble:
            progress += f"; the last try failed: {self._upkeep.trouble}"
        return Outlook(serving.listed, self.failure(), progress, self._term.token)

    def report(self) -> dict[str, Any]:
        """Return the plan, the ranks, and the counters of every engine. Unknown values are left
        out.

        The top level of the report contains the report of the first group. ``groups`` contains the
        reports of the other groups. ``lost_groups`` contains the name of each lost group and the
        reason of its loss.
        """
        groups = self._groups if self._serving is None else list(self._serving.groups)
        lost_groups: list[str] = []
        missing_groups = {"count": 0, "reason": ""}
        # Losses and missing groups are read first, because ``_reports_of`` can wait for a dying
        # engine.
        if self._serving is not None and self._upkeep is not None:
            lost_groups = self._serving.watch.losses()
            missing_groups = {"count": self._serving.num_missing, "reason": self._upkeep.trouble}
        reports = self._reports_of(groups)
        merged = dict(reports[0]) if reports else {}
        merged["state"] = self._state.value
        merged["failure"] = self.failure()
        merged["controller"] = self._name
        merged["logs"], merged["ray_logs"] = str(folder_path(self._config.logging)), ray_logs()
        merged["ray_address"] = ray.get_runtime_context().gcs_address
        merged["groups"] = reports[1:]
        merged["lost_groups"], merged["missing_groups"] = lost_groups, missing_groups
        return merged

    def _reports_of(self, groups: Sequence[LockstepGroup]) -> list[dict[str, Any]]:
        """Request the reports of all engines at the same time. So an engine that hangs does not
        delay other reports.
        """
        asked = [g.engine.report.remote() for g in groups if g.engine is not None]
        ready = ray.wait(asked, num_returns=len(asked), timeout=REPORT_S)[0] if asked else []
        answers = iter(asked)
        reports = []
        for group in groups:
            ref = next(answers) if group.engine is not None else None
            try:
                reports.append(dict(ray.get(ref)) if ref in ready else group_report(group))
            except RayError:  # a dead engine has no counters
                reports.append(group_report(group))
        return reports

    # ---- from configuration to serving

    def start(self) -> Reach:
        """Run all phases.

        Raises:
            DistAclGraphError: the first error; everything that was started is stopped before the
                error is raised.
        """
        try:
            planner = Planner.from_config(self._config)
            for reason in planner.mode_reasons:
                logger.warning(reason)
            startup = Startup(
                planner,
                self._groups,
                self._starter,
                self._start_limit,
                self._enter,
                self._show,
            )
            ranks = list(planner.layout.lockstep_groups)
            if count := self._term.num_groups:
                ranks = ranks_of_groups(len(ranks[0]), 0, count)
            timeout_s = self._config.timeouts.place_s
            request = bundles_of_groups(self._config, len(ranks))
            self._spares.hold(request, len(ranks), timeout_s)
            startup.run(ranks, deployment=self._name)
            return self._serve(planner, startup.scopes)
        except Exception as e:
            self._failure = str(e)
            phase = self._state.value
            event(logger, "start_failed", logging.ERROR, phase=phase, cause=self._failure)
            self._stop_actors()
            self._enter(State.STOPPED, only_from=NOT_STOPPED)
            if isinstance(e, DistAclGraphError):
                raise
            if isinstance(e, RayError):
                raise ours(e, phase) from e
            raise WorkerError(f"{type(e).__name__}: {e}", phase=phase) from e

    def _enter(self, state: State, *, only_from: Collection[State] = frozenset(State)) -> bool:
        """If the current state is in ``only_from``, enter ``state`` and return True."""
        with self._entering:
            if self._state not in only_from:
                return False
            before, self._state = self._state, advance(self._state, state)
            self._progress = Progress(state.value)
            now_s = time.monotonic()
            took_s, self._entered_s = now_s - self._entered_s, now_s
        event(logger, "state", state=state.value, previous=before.value, seconds=took_s)
        return True

    def _show_phase(self, phase: State) -> None:
        """Record the phase of groups that start or drain while other groups serve."""
        if phase.value != self._progress.state:
            event(logger, "phase", phase=phase.value)
        self._progress = Progress(phase.value)

    def _show(self, done: int, total: int, detail: str) -> None:
        self._progress = Progress(self._progress.state, done, total, detail)

    def _serve(self, planner: Planner, scopes: list[list[LockstepGroup]]) -> Reach:
        serving = ServingGroups(
            self._name,
            self._term,
            planner,
            self._spares,
            self._starter,
            self._start_limit,
            self._show_phase,
            self._show,
        )
        serving.open(planner, scopes)
        serving.watch.start()
        self._serving, self._upkeep = serving, Upkeep(serving, self._see_service)
        self._enter(State.SERVING)
        self._upkeep.start()
        return self.reach()

    def _see_service(self, serves: bool) -> None:
        """Change from SERVING to RECOVERING, or from RECOVERING to SERVING."""
        if serves and self._enter(State.SERVING, only_from={State.RECOVERING}):
            event(logger, "service_restored", logging.WARNING)
        elif not serves and self._enter(State.RECOVERING, only_from={State.SERVING}):
            cause = self._serving and self._serving.watch.failure()
            event(logger, "service_lost", logging.ERROR, cause=cause)

    # ---- while it serves

    def reach(self) -> Reach:
        """Return the addresses at which clients reach the deployment now."""
        serving = self._open_groups(State.RECOVERING)
        node_id = ray.get_runtime_context().get_node_id()
        return Reach(serving.addresses, self._term.token, serving.max_model_len, node_id)

    def scale(self, count: int) -> None:
        """Set the number of groups that accept requests; see ``ServingGroups.scale``."""
        self._open_groups().scale(count)

    def roll(self, config: Config) -> None:
        """Replace all groups by groups with another configuration; see ``ServingGroups.roll``."""
        # All groups of a deployment write into one log folder.
        self._open_groups().roll(with_log_folder(config, self._config.logging.folder))

    def _open_groups(self, *others: State) -> ServingGroups:
        if self._serving is None or self._state not in (State.SERVING, *others):
            raise EngineUnavailableError(f"the deployment is {self._state.value}, not SERVING")
        return self._serving

    # ---- the end

    def shut_down(self) -> None:
        """Let the engines end their step loops, and let the workers exit. Then kill all processes
        that still run.
        """
        self._enter(State.DRAINING, only_from={State.SERVING})
        self._stop_actors()
        self._enter(State.STOPPED, only_from=NOT_STOPPED)

    def _stop_actors(self) -> None:
        groups = self._groups
        if self._serving is not None and self._upkeep is not None:
            self._upkeep.stop()
            self._serving.watch.stop()
            groups = [*self._serving.groups, *self._serving.starting]
        self._spares.release()
        self._starter.close()
        stop_groups(groups, self._config.timeouts.stop_s)
