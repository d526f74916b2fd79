"""Opens, adds, drains and replaces groups of a deployment while other groups serve.

After each change, the controller sends the new list of groups to the engines, and the engines send
the list to their clients (``GroupList``). A draining group gets no new requests, and finishes its
running requests. Then its NPUs are freed. Only one change runs at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from ray.exceptions import RayError

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.ray_errors import ours
from dist_aclgraph.actors.cluster.spares import Spares
from dist_aclgraph.actors.controller.group_calls import drain_groups, open_group, stop_groups
from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.group_watch import GroupWatch
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.roll import check_roll, early_end
from dist_aclgraph.actors.controller.startup import OnGraph, OnPhase, Startup, side_by_side
from dist_aclgraph.actors.controller.state import State
from dist_aclgraph.actors.controller.survivors import gather_survivors
from dist_aclgraph.actors.controller.term import Term
from dist_aclgraph.actors.controller.traffic_watch import TrafficWatches
from dist_aclgraph.actors.host import run_directory
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.messages import GroupList
from dist_aclgraph.actors.worker.worker_group import bundles_of_groups
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    ConfigError,
    DistAclGraphError,
    EngineUnavailableError,
    PlacementError,
    RollError,
)
from dist_aclgraph.logs import event, logged
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit
from dist_aclgraph.topology import Ranks, WorldRank

logger = logging.getLogger(__name__)


class ServingGroups:
    """Owns the groups of a deployment from the time when they begin to serve.

    Args:
        deployment: name of the deployment; the names of placement groups begin with it.
        term: the values that previous controllers have passed to this controller.
        planner: the planner for the configuration of the first groups.
        spares: the NPUs that are reserved for groups that lose their own NPUs.
        starter: starts the processes of groups.
        start_limit: the time limit for the start of these processes.
        on_phase, on_graph: functions that are called with the progress of a change; see
            ``Startup``.

    Attributes:
        groups: the groups that clients know. A lost group stays until another group replaces it.
        starting: the groups that are being started.
        num_wanted: how many groups should accept requests.
        part: the current part of the running change, e.g. "group 2 of 3".
    """

    def __init__(
        self,
        deployment: str,
        term: Term,
        planner: Planner,
        spares: Spares,
        starter: ProcessStarter,
        start_limit: StartLimit,
        on_phase: OnPhase,
        on_graph: OnGraph,
    ) -> None:
        self._deployment = deployment
        self._token = term.token
        self._planner = planner
        self._spares = spares
        self._starter = starter
        self._start_limit = start_limit
        self._on_phase = on_phase
        self._on_graph = on_graph
        self._started_s = time.monotonic()
        self._changing = threading.Lock()
        self._version = term.first_version
        self._next_number = term.first_group
        self._num_ranks = 0
        self._leaving: LockstepGroup | None = None  # the group that a roll is replacing now
        self.groups: list[LockstepGroup] = []
        self.starting: list[LockstepGroup] = []
        self.num_wanted = term.num_groups or len(planner.layout.lockstep_groups)
        self.part = ""
        self.max_model_len = term.max_model_len
        self.traffic = TrafficWatches()
        self.watch = GroupWatch(planner.config.timeouts.link_s)

    @property
    def config(self) -> Config:
        """The configuration of the group that started last. ``scale`` and ``replace_one`` add
        groups with this configuration.
        """
        return self._planner.config

    @property
    def taking(self) -> list[LockstepGroup]:
        """The groups that accept requests, the oldest first."""
        return [g for g in self.groups if g.state is GroupState.SERVING]

    @property
    def serves(self) -> bool:
        """Whether at least one group runs requests."""
        return any(not group.is_lost for group in self.groups)

    @property
    def listed(self) -> GroupList:
        """The list of groups that is sent to clients."""
        return GroupList(self._version, tuple(group.entry for group in self.groups))

    @property
    def num_missing(self) -> int:
        return max(0, self.num_wanted - len(self.taking))

    @property
    def is_changing(self) -> bool:
        return self._changing.locked()

    @property
    def addresses(self) -> list[Address]:
        return [group.address for group in self.groups]

    # ---- changes

    def open(self, planner: Planner, scopes: Sequence[list[LockstepGroup]]) -> None:
        """Start the step loops of groups whose graphs are captured. Then tell clients about these
        groups.

        Raises:
            ConfigError: the caches are too small for the context length that was promised to
                clients.
            WorkerError: a rank did not start its step loop.
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
        for group in new:
            group.number, self._next_number = self._next_number, self._next_number + 1
            group.prefills = self._lacks_prefill(group.planner.config, new)
        side_by_side(partial(open_group, token=self._token, controller_s=self._started_s), new)
        for group in new:
            group.enter(GroupState.SERVING)
            group.opened_s = time.monotonic()
            event(logger, "group_serving", **group.facts)
            self._num_ranks = max(self._num_ranks, 1 + max(group.workers.ranks))
        self.groups += new
        self._planner = planner
        self.watch.add(new)
        for scope in scopes:
            self.traffic.add(scope)
        self._publish()

    def _lacks_prefill(self, config: Config, new: Sequence[LockstepGroup]) -> bool:
        """Whether there are fewer prefill groups than ``parallel.prefill_groups``. The group that a
        roll is replacing is not counted.
        """
        stay = [each for each in (*self.taking, *new) if each is not self._leaving]
        return sum(each.prefills for each in stay) < config.parallel.prefill_groups

    def scale(self, count: int, room_s: float = placement.ROOM_S) -> None:
        """Change the number of groups that accept requests; remove lost groups.

        Other changes can start while this change waits for free NPUs.

        Args:
            room_s: how long to wait for free NPUs, in seconds.

        Raises:
            ConfigError: ``count`` is not positive.
            PlacementError: there are not enough NPUs.
            EngineUnavailableError: another change is running.
            DistAclGraphError: new groups did not start; the other groups continue to serve.
        """
        check_count(count)
        with self._change():
            self.give_up_lost(are_replaced=False)
        if count > len(self.taking):
            self.check_room(count - len(self.taking), room_s)
        with self._change("scale", before=len(self.taking), wanted=count):
            missing = count - len(self.taking)
            if missing > 0:
                self._add(self._planner, missing)
            self.num_wanted = count
            self._give_back(self.lost)
            self._drain(surplus(self.taking, count))

    def replace_one(self) -> None:
        """Start a group if a group is missing. Then remove one lost group from the clients' group
        list.

        If possible, the surviving workers of the lost group become part of the new group.

        Raises:
            PlacementError: there are not enough NPUs for a group.
            EngineUnavailableError: another change is running.
            DistAclGraphError: the new group did not start; the other groups continue to serve.
        """
        with self._change("replace_group", missing=self.num_missing):
            lost = sorted(self.lost, key=lambda group: group.state is not GroupState.DETACHED)[:1]
            is_rejoined = bool(self.num_missing) and any(map(self._rejoin, lost))
            if self.num_missing and not is_rejoined:
                self._add(self._planner, 1)
            for group in lost:
                away_s = time.monotonic() - group.lost_s
                way = "rejoin" if is_rejoined else "rebuild"
                event(logger, "group_replaced", group=group.number, way=way, seconds=away_s)
            self._give_back(lost)
            self._ask_for_spares()

    def _rejoin(self, group: LockstepGroup) -> bool:
        """Start a new group with the surviving workers of ``group``. Return whether the new group
        serves.
        """
        if group.state is not GroupState.DETACHED:
            return False
        lost = group.lost_ranks
        try:
            self._start(group.planner, lambda startup: startup.rejoin(group.workers, lost))
        except (DistAclGraphError, RayError) as e:
            event(logger, "rejoin_failed", logging.WARNING, group=group.number, cause=str(e))
            group.give_up()
            self._make_room()
            return False
        except BaseException:
            group.give_up()
            raise
        return True

    def roll(self, config: Config) -> None:
        """Replace one group after the other by a group with another configuration.

        If there are free NPUs for the new group, the new group starts before the old group is
        drained. Otherwise the new group starts after the old group has drained. If a previous roll
        to the same configuration ended early, this call replaces only the groups that still have
        the old configuration.

        Raises:
            ConfigError: ``config`` changes a key that a running service cannot change; or the new
                groups cannot run requests of the context length that was promised to clients.
            PlacementError: there is only one group, and there are no NPUs for a second group.
            EngineUnavailableError: another change is running.
            RollError: the roll ended early; the message says which group runs which configuration.
            DistAclGraphError: the first new group did not start; nothing has changed.
        """
        planner = Planner.from_config(config)
        check_roll(self.config, config)
        with self._change("roll", groups=len(self.taking)):
            self.give_up_lost(are_replaced=False)
            before = left = self.taking
            if planner.config == self.config:
                unfinished = [g for g in before if g.planner is not self._planner]
                planner, left = (self._planner, unfinished) if unfinished else (planner, before)
            for done, group in enumerate(left):
                self.part = f"group {done + 1} of {len(left)}"
                try:
                    self._replace(group, planner)
                except (DistAclGraphError, RayError) as e:
                    cause = ours(e, "starting a group")
                    if self.taking == before:
                        raise cause from e
                    raise RollError(early_end(self.taking, planner, self.num_wanted, cause)) from e
            self._spares.release()  # these spares may have the wrong size for new groups
            self._ask_for_spares()

    def _replace(self, group: LockstepGroup, planner: Planner) -> None:
        request = bundles_of_groups(planner.config, 1)
        if placement.has_room(request, 1):
            self._leaving = group
            try:
                self._add(planner, 1)
            finally:
                self._leaving = None
            self._drain([group])
        elif len(self.taking) > 1:
            self._drain([group])
            self._add(planner, 1)
        else:
            free = placement.count_npus(request, placement.free_nodes())
            raise PlacementError(
                f"the only group is to be replaced, and another one needs {request.size} NPUs; "
                f"free are {free}; add some, or stop the service and start it anew"
            )

    @contextmanager
    def _change(self, name: str = "", **fields: Any) -> Iterator[None]:
        """Hold the lock that allows only one change of the groups at a time. If the change has a
        name, write the change to the log.
        """
        if not self._changing.acquire(blocking=False):
            raise EngineUnavailableError("the groups are being changed already; try again later")
        try:
            with logged(logger, name, **fields) if name else nullcontext():
                yield
        finally:
            self._on_phase(State.SERVING)
            self.part = ""
            self._changing.release()

    def check_room(self, count: int, wait_s: float) -> None:
        """Wait until there are free NPUs for ``count`` more groups.

        Raises:
            PlacementError: there are not enough NPUs after ``wait_s``.
        """
        request = bundles_of_groups(self.config, count)
        if not placement.has_room(request, count, wait_s):
            free = placement.count_npus(request, placement.free_nodes())
            raise PlacementError(
                f"{count} groups more need {count * request.size} NPUs; free are {free}; "
                "add nodes, or ask for fewer groups"
            )

    @property
    def lost(self) -> list[LockstepGroup]:
        """The lost groups that clients still know, the oldest first."""
        return [group for group in self.groups if group.is_lost]

    def find_place(self) -> None:
        """Find NPUs for a missing group. These can be the NPUs of surviving workers, reserved NPUs,
        or free NPUs.

        Other changes can start while this change waits for free NPUs.

        Raises:
            PlacementError: there are not enough NPUs.
            EngineUnavailableError: another change is running.
        """
        with self._change():
            for group in self.lost:
                if self._may_rejoin(group) and gather_survivors(group):
                    return
                group.give_up()
            if self._spares.give():
                return
        self.check_room(1, placement.ROOM_S)

    def prepare_starter(self) -> None:
        """If the fork server has died, start a new fork server before a group needs one."""
        if not self.is_changing:
            self._starter.command(self.config)

    def give_up_lost(self, *, are_replaced: bool) -> None:
        """Free the NPUs of lost groups whose workers cannot join a new group.

        Args:
            are_replaced: whether lost groups will be replaced. If False, the NPUs of all lost
                groups are freed.
        """
        for group in self.lost:
            if not (are_replaced and self._may_rejoin(group)):
                group.give_up()

    def _may_rejoin(self, group: LockstepGroup) -> bool:
        # A new group has the newest configuration. Workers have the weights of the configuration
        # with which they were started. So a worker can join the new group only if the worker was
        # started with the newest configuration.
        return group.planner is self._planner and group.way_back() == "REJOIN"

    def _make_room(self) -> None:
        """Find NPUs for a replacement group: release a spare, or check that enough NPUs are free.

        The check can be wrong: Ray notices the death of a node late, and counts the node's NPUs as
        free until then. So Ray may place the group on a dead node.

        Raises:
            PlacementError: there is no spare, and there are not enough free NPUs.
        """
        if not self._spares.give():
            self.check_room(1, placement.ROOM_S)

    def _ask_for_spares(self) -> None:
        try:
            self._spares.refill(bundles_of_groups(self.config, 1))
        except PlacementError as e:  # the next change tries again
            logger.warning("no spares are held: %s", e)

    def _add(self, planner: Planner, count: int) -> None:
        size = len(planner.layout.lockstep_groups[0])
        ranks = ranks_of_groups(size, self._num_ranks, count)
        self._start(planner, lambda startup: startup.run(ranks, deployment=self._deployment))

    def _start(self, planner: Planner, run: Callable[[Startup], None]) -> None:
        """Start groups while other groups serve. If one of the new groups fails, kill all new
        groups.
        """
        new: list[LockstepGroup] = []
        self.starting = new
        self._on_phase(State.PLACING)
        startup = Startup(
            planner, new, self._starter, self._start_limit, self._on_phase, self._on_graph
        )
        try:
            run(startup)
            self.open(planner, startup.scopes)
        except BaseException:
            for group in new:
                group.kill()
            if not startup.has_placed:
                self._starter.renew()
            raise
        finally:
            self.starting = []

    def _drain(self, groups: Sequence[LockstepGroup]) -> None:
        """Drain groups at the same time; remove each group after it has drained."""
        if not groups:
            return
        for group in groups:
            group.enter(GroupState.DRAINING)
            event(logger, "group_draining", group=group.number)
        version = self._publish()
        self._on_phase(State.DRAINING)
        for group, problem in drain_groups(groups, version):
            if problem:
                logger.warning("%s has not drained: %s", group.name, problem)
            event(logger, "group_drained", group=group.number, problem=problem or None)
            self._give_back([group])

    def _give_back(self, groups: Sequence[LockstepGroup]) -> None:
        if not groups:
            return
        for group in groups:
            self.watch.remove(group)
            self.traffic.remove(group)
            self.groups.remove(group)
        self._publish()
        stop_groups(groups, self.config.timeouts.stop_s)
        run_directory.sweep()  # ``sweep`` removes the directories of dead engines

    def _publish(self) -> int:
        """Send the list of groups to all engines. Return the version of the list."""
        self._version += 1
        listed = self.listed
        for group in self.groups:
            group.engine.set_groups.remote(listed)
        return self._version

    def set_restarts(self, ages_s: Sequence[float]) -> None:
        """Send all engines the age of each restart in the last hour, in seconds."""
        for group in self.groups:
            group.engine.set_restarts.remote(ages_s)


def ranks_of_groups(size: int, first: int, count: int) -> list[Ranks]:
    """Return the ranks of ``count`` groups of ``size`` ranks each, from world rank ``first`` on."""
    starts = range(first, first + count * size, size)
    return [tuple(map(WorldRank, range(start, start + size))) for start in starts]


def surplus(groups: Sequence[LockstepGroup], count: int) -> list[LockstepGroup]:
    """Return the groups that must be drained so that ``count`` groups remain.

    First, groups that generate output are drained, but one such group always remains. Then prefill
    groups are drained. Of the groups of each kind, the newest group is drained first.

    Args:
        groups: the groups that accept requests, the oldest first.
    """
    prefill = [group for group in groups if group.prefills]
    others = [group for group in groups if not group.prefills]
    num_others = min(len(others), max(1, count - len(prefill)))
    kept = prefill[: count - num_others] + others[:num_others]
    return [group for group in groups if group not in kept]


def check_count(count: int) -> None:
    """Check that a deployment may have this number of groups.

    Raises:
        ConfigError: the number is too small.
    """
    if count < 1:
        raise ConfigError(f"{count} groups were asked for; a deployment has at least 1")
