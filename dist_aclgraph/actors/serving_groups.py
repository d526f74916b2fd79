"""The groups of a serving deployment: opened, added, drained and replaced while others serve.

What changes is told to the engines, whose clients hear of it from any of them (``Groups``). A group
that drains gets no new requests, ends what it has, and is given back. One change at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors import placement
from dist_aclgraph.actors.addresses import Address
from dist_aclgraph.actors.engine import EngineSettings
from dist_aclgraph.actors.group_watch import GroupWatch
from dist_aclgraph.actors.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.messages import GroupEntry, Groups
from dist_aclgraph.actors.ray_errors import ours
from dist_aclgraph.actors.startup import EPOCH, Startup, side_by_side
from dist_aclgraph.actors.traffic_watch import TrafficWatch
from dist_aclgraph.actors.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    ConfigError,
    EngineUnavailableError,
    PlacementError,
    WorkerError,
)
from dist_aclgraph.planning.autoscale import Autoscaler, Demand
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import RestartBudget

logger = logging.getLogger(__name__)

ANSWER_S = 10.0  # beyond the time that an engine was given
COUNT_S = 1.0  # between two counts of what runs and waits
OF_THE_INGRESS = ("model", "name", "seed")  # what ingress replicas have read already


class ServingGroups:
    """Owns the groups of a deployment from the moment that they serve.

    Args:
        deployment: its name, with which those of placement groups begin.
        token: what clients must know.
        planner: of groups that are added.
    """

    def __init__(self, deployment: str, token: str, planner: Planner) -> None:
        self._deployment = deployment
        self._token = token
        self._planner = planner
        self._started_s = time.monotonic()
        self._changing = threading.Lock()
        self._version = 0
        self._num_groups = 0  # ever; their names
        self._num_ranks = 0
        autoscale = planner.config.serve.autoscale
        self._autoscaler = Autoscaler(autoscale) if autoscale.max_groups else None
        self._next_count_s = 0.0
        self._restarts = RestartBudget(planner.config.recovery.restarts_per_hour)
        self._given_up: set[int] = set()  # numbers of lost groups that are not replaced
        self._traffic: list[tuple[Planner, TrafficWatch]] = []
        self.groups: list[LockstepGroup] = []
        self.max_model_len = 0
        self.watch = GroupWatch(planner.config.timeouts.link_s, self._look)

    @property
    def config(self) -> Config:
        """Of groups that are added."""
        return self._planner.config

    @property
    def taking(self) -> list[LockstepGroup]:
        """The groups that take requests, the oldest first."""
        return [g for g in self.groups if not g.lost_because and not g.is_draining]

    @property
    def addresses(self) -> list[Address]:
        return [group.address for group in self.groups]

    # ---- changes

    def open(self, planner: Planner, scopes: Sequence[list[LockstepGroup]]) -> None:
        """Send groups that have captured their graphs into their loops, and let clients know.

        Raises:
            ConfigError: requests that were promised to fit do not fit into their caches.
            WorkerError: a rank did not come into its loop.
        """
        new = [group for scope in scopes for group in scope]
        longest = min(
            planner.cache_spec.longest_request(group.num_blocks, planner.max_model_len)
            for group in new
        )
        if longest < self.max_model_len:
            raise ConfigError(
                f"a new group holds requests of at most {longest} tokens, and "
                f"{self.max_model_len} are promised; raise kv.num_blocks or max_model_len"
            )
        self.max_model_len = self.max_model_len or longest
        side_by_side(lambda group: self._open(group, planner), new)
        for group in new:
            group.number, self._num_groups = self._num_groups, self._num_groups + 1
            self._num_ranks = max(self._num_ranks, 1 + max(group.workers.ranks))
        self.groups += new
        self.watch.add(new)
        for scope in scopes:
            self._watch_traffic(planner, scope)
        self._publish()

    def scale(self, count: int) -> None:
        """Have so many groups take requests; dead ones are given back.

        Raises:
            ConfigError: ``count`` is not positive.
            PlacementError: there are not so many NPUs.
            EngineUnavailableError: another change is under way.
            DistAclGraphError: new groups did not come up; the others serve on.
        """
        if count < 1:
            raise ConfigError(f"{count} groups were asked for; a deployment has at least 1")
        with self._change():
            for group in [group for group in self.groups if group.lost_because]:
                self._give_back(group)
            taking = self.taking
            if count > len(taking):
                self._check_room(count - len(taking))
                self._add(self._planner, count - len(taking))
            for group in reversed(taking[count:]):
                self._drain(group)

    def roll(self, config: Config) -> None:
        """Replace all groups by groups of another configuration, one after the other.

        A new group comes before an old one goes where there is room for both, else after it.

        Raises:
            ConfigError: the configuration changes what only a new service can, or promises less.
            PlacementError: one group is all there is room for.
            EngineUnavailableError: another change is under way.
            DistAclGraphError: a new group did not come up; all that serves goes on.
        """
        planner = Planner.from_config(config)
        for key in OF_THE_INGRESS:
            old, new = getattr(self.config, key), getattr(config, key)
            if old != new:
                raise ConfigError(
                    f"{key} changes, which ingresses have read; start a new service for it"
                )
        with self._change():
            size = len(planner.layout.lockstep_groups[0])
            for group in self.taking:
                if placement.has_room(size):
                    self._add(planner, 1)
                    self._drain(group)
                elif len(self.taking) > 1:
                    self._drain(group)
                    self._add(planner, 1)
                else:
                    raise PlacementError(
                        f"the only group is to be replaced, and no {size} NPUs are free for "
                        "another one; add some, or stop the service and start it anew"
                    )
            self._planner = planner

    @contextmanager
    def _change(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise EngineUnavailableError("the groups are being changed already; try again later")
        try:
            yield
        finally:
            self._changing.release()

    def _check_room(self, count: int) -> None:
        needed = count * len(self._planner.layout.lockstep_groups[0])
        if not placement.has_room(needed):
            raise PlacementError(
                f"{count} groups more need {needed} NPUs, and {placement.num_free():g} are free; "
                "add nodes, or ask for fewer groups"
            )

    def _add(self, planner: Planner, count: int) -> None:
        """Start groups beside those that serve: nothing is left of them if one fails."""
        size = len(planner.layout.lockstep_groups[0])
        first = self._num_ranks
        ranks = [tuple(range(first + i * size, first + (i + 1) * size)) for i in range(count)]
        new: list[LockstepGroup] = []
        startup = Startup(planner, new, lambda state: None, lambda done, total, detail: None)
        try:
            startup.run(ranks, deployment=self._deployment)
            self.open(planner, startup.scopes)
        except BaseException:
            for group in new:
                group.kill()
            raise

    def _drain(self, group: LockstepGroup) -> None:
        """Let a group end what it has, and give it back."""
        timeout_s = self.config.timeouts.drain_s
        group.is_draining = True
        version = self._publish()
        try:
            draining = group.engine.drain.remote(version, timeout_s)
            if not ray.get(draining, timeout=timeout_s + ANSWER_S):
                logger.warning("%s has not drained within %g s", group.name, timeout_s)
        except RayError as e:  # it has died meanwhile: what it had has ended
            logger.warning("%s", ours(e, f"draining {group.name}"))
        self._give_back(group)

    def _give_back(self, group: LockstepGroup) -> None:
        self.watch.remove(group)
        self.groups.remove(group)
        self._publish()
        stop_groups([group], self.config.timeouts.stop_s)

    # ---- what follows from a change

    def _publish(self) -> int:
        """Tell all engines which groups there are; return the version of the list."""
        self._version += 1
        groups = Groups(
            self._version,
            self._planner.cache_spec.tokens_per_block,
            tuple(
                GroupEntry(
                    str(group.number),
                    group.address,
                    group.num_blocks * self._planner.layout.within_group.dp,
                    group.is_draining,
                )
                for group in self.groups
            ),
        )
        for group in self.groups:
            group.engine.set_groups.remote(groups)
        return self._version

    def _watch_traffic(self, planner: Planner, groups: list[LockstepGroup]) -> None:
        if planner.config.graph.scope == "cluster":
            for known, watch in self._traffic:
                if known is planner:
                    watch.add(groups)
                    return
        self._traffic.append((planner, TrafficWatch(planner, groups)))

    def _look(self, now_s: float) -> None:
        for _, watch in list(self._traffic):
            watch.look(now_s)
        self._look_for_losses(now_s)
        if self._autoscaler is not None and now_s >= self._next_count_s:
            self._next_count_s = now_s + COUNT_S
            self._autoscale(now_s, self._autoscaler)

    def _look_for_losses(self, now_s: float) -> None:
        """Have lost groups replaced, on a thread of its own, while others serve."""
        lost = [g for g in self.groups if g.lost_because and g.number not in self._given_up]
        if not lost or not self.taking or self._changing.locked():
            return
        for group in lost:
            if self._restarts.take(now_s):
                logger.warning("%s is replaced: %s", group.name, group.lost_because)
                count = len(self.taking) + 1
                threading.Thread(target=self._try_scale, args=[count], daemon=True).start()
                return
            self._given_up.add(group.number)
            logger.error(
                "%s stays lost: recovery.restarts_per_hour allows %d, and they were taken",
                group.name,
                self._restarts.per_hour,
            )

    def _autoscale(self, now_s: float, autoscaler: Autoscaler) -> None:
        """Have one group more or less where the requests want it, on a thread of its own."""
        taking = self.taking
        if not taking or self._changing.locked():
            return
        try:
            demands = ray.get([g.engine.demand.remote() for g in taking], timeout=ANSWER_S)
        except RayError:
            return  # the watch will hear of it
        running, waiting = map(sum, zip(*demands, strict=True))
        rows = self.config.scheduler.max_num_seqs * self._planner.layout.within_group.dp
        wanted = autoscaler.decide(now_s, Demand(len(taking), running, waiting, rows))
        if wanted != len(taking):
            logger.info("%d groups, as %d requests run and %d wait", wanted, running, waiting)
            threading.Thread(target=self._try_scale, args=[wanted], daemon=True).start()

    def _try_scale(self, count: int) -> None:
        try:
            self.scale(count)
        except Exception:  # whatever it is: what serves goes on
            logger.exception("changing the number of groups to %d failed", count)

    # ---- one group

    def _open(self, group: LockstepGroup, planner: Planner) -> None:
        """Send a group's workers into their loops, and learn where clients reach its engine."""
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
        serving: Any = group.engine.serve.remote(settings)
        # A worker that dies on its way into the loop must not leave us waiting.
        ready, _ = ray.wait([serving, *group.loops], num_returns=1, timeout=timeout_s)
        if not ready:
            raise WorkerError(f"no step loop within {timeout_s:g} s", phase="CAPTURING")
        if ready[0] != serving:
            fetch(ready[0], group.workers.ranks[group.loops.index(ready[0])], "CAPTURING")
        group.opened_at = ray.get(serving, timeout=timeout_s)


def stop_groups(groups: Sequence[LockstepGroup], timeout_s: float) -> None:
    """Stop in order: engines say goodbye, workers leave, what is left is killed."""
    stopping = [
        ref
        for group in groups
        if group.engine is not None
        for ref in (group.engine.stop.remote(), *group.loops)
    ]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
    for group in groups:
        group.kill()
