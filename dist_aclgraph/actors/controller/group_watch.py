"""Watches a deployment's groups. When a group dies, the other groups continue to serve."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.cluster.ray_errors import death_of
from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.host.liveness import Silence, beat_s
from dist_aclgraph.actors.worker.worker_group import fetch
from dist_aclgraph.errors import DistAclGraphError, EngineDeadError
from dist_aclgraph.files.log_folder import folder_path
from dist_aclgraph.logs import event
from dist_aclgraph.topology import GroupRank, WorldRank

WATCH_S = 0.2

logger = logging.getLogger(__name__)


class _Heartbeat:
    """Asks one actor for heartbeats again and again. The actor's control thread responds.

    Args:
        ask: a function that sends the actor a heartbeat question with a given number.
    """

    def __init__(self, ask: Callable[[int], Any], link_s: float) -> None:
        self._ask = ask
        self._number = 1
        self._answer = ask(self._number)
        self._silence = Silence(link_s)

    def listen(self) -> str:
        """Return why the actor counts as lost; "" while the actor responds."""
        if ray.wait([self._answer], timeout=0)[0]:
            self._silence.heard()
            self._number += 1
            # The answer may be an error. An error does not prove that the actor is dead. The death
            # of an actor ends its running call, which ``GroupWatch._owner`` contains.
            self._answer = self._ask(self._number)
        elif self._silence.listen():
            return f"it has not answered for {self._silence.silent_s:.1f} s, not even a heartbeat"
        return ""


class GroupWatch:
    """Notices which groups are lost and why. Ends the remaining processes of a lost group.

    Args:
        link_s: the configured ``timeouts.link_s``, in seconds. An engine or a worker that is silent
            for longer counts as lost.
    """

    def __init__(self, link_s: float) -> None:
        self._lock = threading.Lock()  # guards groups, references and heartbeats
        self._groups: list[LockstepGroup] = []
        self._link_s = link_s
        self._beat_s = beat_s(link_s)
        # The keys are running calls of actors. The values are the actor's group and rank; an
        # engine's rank is None.
        self._owner: dict[Any, tuple[LockstepGroup, WorldRank | None]] = {}
        self._heartbeats: list[tuple[LockstepGroup, WorldRank | None, _Heartbeat]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, groups: Sequence[LockstepGroup]) -> None:
        """Watch groups that have started to serve."""
        for group in groups:
            members = list(
                zip(group.workers.ranks, group.loops, group.workers.workers, strict=True)
            )
            end = group.engine.wait_for_end.remote()
            beats = [
                (group, rank, _Heartbeat(ask, self._link_s))
                for rank, ask in [
                    (None, group.engine.ping.remote),
                    *((rank, worker.ping.remote) for rank, _, worker in members),
                ]
            ]
            with self._lock:
                self._groups.append(group)
                self._owner[end] = (group, None)
                self._owner |= {loop: (group, rank) for rank, loop, _ in members}
                self._heartbeats += beats

    def remove(self, group: LockstepGroup) -> None:
        """Stop watching a group before the group's processes are ended on purpose."""
        with self._lock:
            self._groups.remove(group)
            self._forget(group)
            self._heartbeats = [beat for beat in self._heartbeats if beat[0] is not group]

    def _forget(self, group: LockstepGroup) -> None:
        """Stop watching the running calls of a group's actors.

        The heartbeat questions to the engine continue, because each question renews the engine's
        lease. The engine must live until it has told its clients why the group was lost.
        """
        self._owner = {ref: owner for ref, owner in self._owner.items() if owner[0] is not group}
        self._heartbeats = [b for b in self._heartbeats if b[0] is not group or b[1] is None]

    def stop(self) -> None:
        self._stopping.set()

    def failure(self) -> str:
        """Return the reasons of the losses if all watched groups are lost; "" while at least one
        watched group serves.
        """
        with self._lock:
            groups = list(self._groups)
        lost = [group.lost_because for group in groups if group.is_lost]
        return "; ".join(lost) if len(lost) == len(groups) else ""

    @property
    def trouble(self) -> str:
        """Return why this object cannot notice the death of a group; "" while its thread works."""
        if self._stopping.is_set() or self._thread.is_alive():
            return ""
        return "the watch over the workers has ended; restart the deployment"

    def losses(self) -> list[str]:
        """Return the lost groups and the reasons."""
        with self._lock:
            return [f"{g.name}: {g.lost_because}" for g in self._groups if g.is_lost]

    # ---- the thread

    def _run(self) -> None:
        next_beat_s = 0.0
        while not self._stopping.is_set():
            with self._lock:
                watched = list(self._owner)
            if watched:
                ready, _ = ray.wait(watched, num_returns=1, timeout=WATCH_S)
            else:
                ready = []
                self._stopping.wait(WATCH_S)
            if self._stopping.is_set():
                return
            for ended in ready:
                self._see_end(ended)
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                self._listen()

    def _see_end(self, ended: Any) -> None:
        with self._lock:
            if ended not in self._owner:
                return  # the group was removed while this thread waited
            group, rank = self._owner[ended]
        if rank is None:
            try:
                reason = ray.get(ended)
            except RayError as e:
                reason = f"the engine is gone: {death_of(e)}"
            self._lose(group, reason)
            return
        try:
            fetch(ended, rank, "SERVING")
        except EngineDeadError:
            pass
        except DistAclGraphError as e:
            self._lose(group, str(e), rank)
            return
        # The worker is not lost: its loop ended because the engine's loop had ended. The engine
        # itself tells its clients the reason.
        with self._lock:
            self._owner.pop(ended, None)

    def _listen(self) -> None:
        with self._lock:
            heartbeats = list(self._heartbeats)
        for group, rank, heartbeat in heartbeats:
            reason = heartbeat.listen()
            if not reason or group.is_lost:
                continue
            if rank is not None:
                self._lose(group, f"rank {rank} in SERVING: {reason}", rank)
            else:
                self._lose(group, f"the engine in SERVING: {reason}")
                # The engine hangs, so it cannot tell its clients the reason. The engine is killed,
                # so that it cannot continue later.
                ray.kill(group.engine)

    def _lose(self, group: LockstepGroup, reason: str, rank: WorldRank | None = None) -> None:
        """End the epoch of a group, and let the group's engine tell the clients the reason.

        If no worker of the group can join a new group (``survivors.py``), all its workers are
        killed.

        Args:
            rank: the rank whose process is lost, if known.
        """
        with self._lock:
            if group not in self._groups:
                return
            if rank is not None:
                group.lost_ranks.add(GroupRank(group.workers.ranks.index(rank)))
            group.lost_s = time.monotonic()
            is_hopeless = group.way_back() == "REBUILD"
            group.lost_because = reason
            group.enter(GroupState.LOST)  # another group can now replace this group
            self._forget(group)
        event(
            logger,
            "group_lost",
            logging.WARNING,
            group=group.number,
            rank=rank,
            cause=reason,
            served_s=group.served_s,
            explain=folder_path(group.planner.config.logging),
        )
        group.engine.fail.remote(reason)
        if is_hopeless:
            group.give_up()
