"""Watching over the lives of a deployment's groups: the death of one ends no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.lockstep_group import LockstepGroup
from dist_aclgraph.actors.ray_errors import death_of
from dist_aclgraph.actors.sockets import Silence
from dist_aclgraph.actors.worker_group import fetch
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.topology import WorldRank

logger = logging.getLogger(__name__)

WATCH_S = 0.2
BEATS_OF_A_SILENCE = 20


class _Heartbeat:
    """Asks one worker for a sign of life, again and again, on its control thread."""

    def __init__(self, worker: Any, link_s: float) -> None:
        self._worker = worker
        self._answer = worker.ping.remote()
        self._silence = Silence(link_s, 2 * link_s / BEATS_OF_A_SILENCE)

    def listen(self, elapsed_s: float) -> str:
        """Return why the worker counts as lost, or "" while it answers."""
        if ray.wait([self._answer], timeout=0)[0]:
            self._silence.heard()
            self._answer = self._worker.ping.remote()  # a dead worker is seen by its loop's end
        elif self._silence.listen(elapsed_s):
            return f"it has not answered for {self._silence.silent_s:.1f} s, not even a heartbeat"
        return ""


class GroupWatch:
    """Finds out which group is lost and why, ends what is left of it, and watches the others.

    Args:
        link_s: a worker that is silent for longer is gone: ``timeouts.link_s``.
        look: called between two looks, for what else is regularly done.
    """

    def __init__(
        self, groups: Sequence[LockstepGroup], link_s: float, look: Callable[[float], None]
    ) -> None:
        self._groups = list(groups)
        self._look = look
        self._beat_s = link_s / BEATS_OF_A_SILENCE
        self._owner: dict[Any, tuple[LockstepGroup, WorldRank | None]] = {}
        self._heartbeats: dict[tuple[int, WorldRank], _Heartbeat] = {}
        for index, group in enumerate(self._groups):
            self._owner[group.engine.wait_for_end.remote()] = (group, None)
            for rank, loop, worker in zip(
                group.workers.ranks, group.loops, group.workers.workers, strict=True
            ):
                self._owner[loop] = (group, rank)
                self._heartbeats[index, rank] = _Heartbeat(worker, link_s)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def failure(self) -> str:
        """Return why nothing is served, or "" while at least one group does."""
        lost = [group.lost_because for group in self._groups if group.lost_because]
        if len(lost) == len(self._groups):
            return lost[0] if len(lost) == 1 else "; ".join(lost)
        if not self._stopping.is_set() and not self._thread.is_alive():
            return "the watch over the workers has ended; restart the deployment"
        return ""

    def losses(self) -> list[str]:
        """Say which groups are lost, and why."""
        return [f"{g.name}: {g.lost_because}" for g in self._groups if g.lost_because]

    # ---- the thread

    def _run(self) -> None:
        beaten_s = time.monotonic()
        while not self._stopping.is_set():
            if not self._owner:
                self._stopping.wait(WATCH_S)
                continue
            ready, _ = ray.wait(list(self._owner), num_returns=1, timeout=WATCH_S)
            if self._stopping.is_set():
                return
            for ended in ready:
                self._see_end(ended)
            elapsed_s = time.monotonic() - beaten_s
            if elapsed_s >= self._beat_s:
                beaten_s += elapsed_s
                self._listen(elapsed_s)
            try:
                self._look(time.monotonic())
            except Exception:  # whatever it is: the watch over lives goes on
                logger.exception("choosing buckets again failed")

    def _see_end(self, ended: Any) -> None:
        group, rank = self._owner[ended]
        if rank is None:
            try:
                reason = ray.get(ended)
            except RayError as e:
                reason = f"the engine is gone: {death_of(e)}"
        else:
            try:
                fetch(ended, rank, "SERVING")
                reason = f"rank {rank} left its step loop"
            except DistAclGraphError as e:
                reason = str(e)
        self._lose(group, reason)

    def _listen(self, elapsed_s: float) -> None:
        for (index, rank), heartbeat in list(self._heartbeats.items()):
            group = self._groups[index]
            if not group.lost_because and (reason := heartbeat.listen(elapsed_s)):
                self._lose(group, f"rank {rank} in SERVING: {reason}")

    def _lose(self, group: LockstepGroup, reason: str) -> None:
        """End the epoch of a group: its requests get the reason, its workers are killed."""
        group.lost_because = reason
        self._owner = {ref: owner for ref, owner in self._owner.items() if owner[0] is not group}
        group.engine.fail.remote(reason)
        group.workers.kill()
