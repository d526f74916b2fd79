"""The controller actor: brings a deployment from configuration to serving, and to its end.

A deployment's way: PLACING, JOINING, LOADING, NEGOTIATING, CAPTURING, SERVING, DRAINING, STOPPED
(``state.py``). What fails before SERVING takes the whole deployment down in order (``startup.py``);
what fails later takes down the lockstep group that it is part of (``group_watch.py``).
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.addresses import Address
from dist_aclgraph.actors.engine import EngineSettings
from dist_aclgraph.actors.group_watch import GroupWatch
from dist_aclgraph.actors.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.processes import leave_with_parent
from dist_aclgraph.actors.ray_errors import ours
from dist_aclgraph.actors.startup import EPOCH, Startup
from dist_aclgraph.actors.state import State, advance
from dist_aclgraph.actors.traffic_watch import TrafficWatch
from dist_aclgraph.actors.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.errors import DistAclGraphError, WorkerError
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.planner import Planner

logger = logging.getLogger(__name__)

REPORT_S = 10.0  # limit of an engine's report


BYTES = "bytes"


@dataclass(frozen=True)
class Progress:
    """What people are shown while a deployment starts; ``BYTES`` as a detail is the unit."""

    state: str
    done: int = 0
    total: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Service:
    """Where a serving deployment is reached, and what its clients must know."""

    addresses: list[Address]
    token: str
    max_model_len: int


class Controller:
    """Owns the plan, the states, and all actors of a deployment.

    Args:
        name: of the deployment; what it holds of the cluster bears it.
    """

    def __init__(self, config: Config, name: str) -> None:
        leave_with_parent()
        self._name = name
        self._config = config
        self._state = State.PLACING
        self._progress = Progress(self._state.value)
        self._failure = ""  # of the start
        self._groups: list[LockstepGroup] = []
        self._watch: GroupWatch | None = None
        self._token = secrets.token_hex(16)
        self._started_s = time.monotonic()

    # ---- answered while start() runs

    def progress(self) -> Progress:
        if self._state is State.LOADING:
            reports = [p for group in self._groups for p in group.workers.progress()]
            done, total = (sum(r["progress"][i] for r in reports) for i in range(2))
            return Progress(self._state.value, done, total, BYTES)
        return self._progress

    def check(self) -> str:
        """Return why the deployment serves no more, or "" while at least one group does."""
        return self._failure or (self._watch.failure() if self._watch is not None else "")

    def report(self) -> dict[str, Any]:
        """Return what is known of the plan, the ranks and every engine's counters.

        ``groups`` are those after the first; ``lost_groups`` says which serve no more, and why.
        """
        reports = [self._report_of(group) for group in self._groups]
        merged = dict(reports[0]) if reports else {}
        merged["state"] = self._state.value
        merged["failure"] = self.check()
        merged["groups"] = reports[1:]
        merged["lost_groups"] = [] if self._watch is None else self._watch.losses()
        return merged

    def _report_of(self, group: LockstepGroup) -> dict[str, Any]:
        if group.engine is not None:
            try:
                return dict(ray.get(group.engine.report.remote(), timeout=REPORT_S))
            except RayError:
                pass  # An engine that is gone has taken its counters along.
        return group_report(group)

    # ---- from configuration to serving

    def start(self) -> Service:
        """Run all phases.

        Raises:
            DistAclGraphError: the first error; everything that was started is stopped by then.
        """
        try:
            planner = Planner.from_config(self._config)
            for reason in planner.mode_reasons:
                logger.warning(reason)
            startup = Startup(planner, self._groups, self._enter, self._show)
            startup.run(deployment=self._name)
            return self._serve(planner, startup.scopes)
        except Exception as e:
            self._failure = str(e)
            phase = self._state.value
            self._stop_actors()
            self._enter(State.STOPPED)
            if isinstance(e, DistAclGraphError):
                raise
            if isinstance(e, RayError):
                raise ours(e, phase) from e
            raise WorkerError(f"{type(e).__name__}: {e}", phase=phase) from e

    def _enter(self, state: State) -> None:
        self._state = advance(self._state, state)
        self._progress = Progress(state.value)

    def _show(self, done: int, total: int, detail: str) -> None:
        self._progress = Progress(self._state.value, done, total, detail)

    def _serve(self, planner: Planner, scopes: list[list[LockstepGroup]]) -> Service:
        addresses = [self._open(group, planner) for group in self._groups]
        watches = [TrafficWatch(planner, groups) for groups in scopes]

        def look(now_s: float) -> None:
            for watch in watches:
                watch.look(now_s)

        self._watch = GroupWatch(self._groups, planner.config.timeouts.link_s, look)
        self._enter(State.SERVING)
        self._watch.start()
        num_blocks = min(group.num_blocks for group in self._groups)
        longest = planner.cache_spec.longest_request(num_blocks, planner.max_model_len)
        return Service(addresses, self._token, longest)

    def _open(self, group: LockstepGroup, planner: Planner) -> Address:
        """Send a group's workers into their loops; return where clients reach its engine."""
        timeout_s = planner.config.timeouts.join_s
        asking = group.engine.channel_addresses.remote(group.workers.node_ids)
        group.loops = group.workers.start_loops(ray.get(asking, timeout=timeout_s))
        report = {
            **group_report(group),
            "emulated": group.workers.is_emulated,
            "block_size": planner.config.kv.block_size,
            "max_model_len": planner.max_model_len,
            "mode_reasons": list(planner.mode_reasons),
            "ready_seconds": time.monotonic() - self._started_s,
        }
        chip = Chip(group.offers[0].device, group.offers[0].cann)
        exchange = ExchangeRule.from_config(planner.config, planner.facts, chip)
        settings = EngineSettings(
            epoch=EPOCH,
            num_blocks=group.num_blocks,
            max_model_len=planner.max_model_len,
            plan=group.captured.plan,
            costs=group.captured.costs,
            lazy_capacity=group.lazy_capacity,
            exchange=exchange,
            counts_shared_blocks=chip.counts_shared_blocks(planner.config, planner.facts),
            token=self._token,
            report=report,
        )
        serving = group.engine.serve.remote(settings)
        # A worker that dies on its way into the loop must not leave us waiting.
        ready, _ = ray.wait([serving, *group.loops], num_returns=1, timeout=timeout_s)
        if not ready:
            raise WorkerError(f"no step loop within {timeout_s:g} s", phase=self._state.value)
        if ready[0] != serving:
            fetch(ready[0], group.workers.ranks[group.loops.index(ready[0])], "CAPTURING")
        address: Address = ray.get(serving, timeout=timeout_s)
        return address

    # ---- the end

    def shut_down(self) -> None:
        """Stop in order: engines say goodbye, workers leave, what is left is killed."""
        if self._state is State.SERVING:
            self._enter(State.DRAINING)
        self._stop_actors()
        if self._state is not State.STOPPED:
            self._enter(State.STOPPED)

    def _stop_actors(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        stopping = [
            ref
            for group in self._groups
            if group.engine is not None
            for ref in (group.engine.stop.remote(), *group.loops)
        ]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=self._config.timeouts.stop_s)
        for group in self._groups:
            if group.engine is not None:
                ray.kill(group.engine)
            group.workers.kill()
