"""The regular work of a serving deployment, on a private thread.

The work consists of five tasks: replace lost groups; add or drain groups when the load changes
(``serve.autoscale``); choose graphs that fit the traffic; remove the directories of dead engines on
this node; replace a dead fork server. The thread never waits for an engine, because an engine that
hangs would delay all work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.host import run_directory
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.logs import event
from dist_aclgraph.planning.autoscale import Autoscaler, Demand
from dist_aclgraph.planning.restarts import Backoff, RestartBudget
from dist_aclgraph.planning.way_back import SOUND_S

logger = logging.getLogger(__name__)

LOOK_S = 0.2
COUNT_S = 1.0  # seconds between two counts of running and waiting requests
# seconds of pause after the first failed attempt to add a group; see ``Backoff`` for later pauses
GROWTH_PAUSE_S = 30.0


class Change(Protocol):
    """A change of the groups. The change is running or has ended."""

    def is_alive(self) -> bool:
        """Whether the change is still running."""


def begin_thread(change: Callable[[], None]) -> Change:
    """Change the groups on a new thread, because a change must not delay other work."""
    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    return thread


class Upkeep:
    """Does the regular work. Owns the thread, the running change, and the restart budget.

    Args:
        on_service: a function that every ``look`` calls. Its argument says whether a group serves.
        clock: monotonic, in seconds.
        begin: a function that starts a change, and does not wait for the change's end.
        count_requests: a function that returns how many requests run and how many wait. If None,
            the engines are queried.

    Attributes:
        trouble: why the last attempt to replace a missing group failed, or why no attempt is
            allowed; "" if there is no such problem.
    """

    def __init__(
        self,
        serving: ServingGroups,
        on_service: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], Change] = begin_thread,
        count_requests: Callable[[Sequence[LockstepGroup]], tuple[int, int]] | None = None,
    ) -> None:
        config = serving.config
        self.trouble = ""
        self._serving = serving
        self._on_service = on_service
        self._restarts = RestartBudget(config.recovery.restarts_per_hour)
        self._seen_lost: set[int] = set()  # numbers of the lost groups that ``_give_back`` has seen
        autoscale = config.serve.autoscale
        self._autoscaler = Autoscaler(autoscale) if autoscale.max_groups else None
        self._growth = Backoff(GROWTH_PAUSE_S)
        self._count_requests = count_requests or Demands().look
        self._next_count_s = self._next_sweep_s = 0.0
        self._clock = clock
        self._begin = begin
        self._change: Change | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Do all work that is due now. Only one thread may call this."""
        now_s = self._clock()
        for look in (
            self._look_for_service,
            self._serving.traffic.look,
            self._look_for_missing,
            self._autoscale,
            self._sweep,
        ):
            try:
                look(now_s)
            except Exception:  # catch any exception, because the next call can succeed
                logger.exception("looking after the groups failed")

    @property
    def _is_changing(self) -> bool:
        is_changing = self._change is not None and self._change.is_alive()
        return is_changing or self._serving.is_changing

    @property
    def ends_recovery(self) -> str:
        """The error text for clients if the restart budget is used up; "" while a group is starting
        or may be started.
        """
        if self._is_changing or self._restarts.is_left(self._clock()):
            return ""
        if self._num_returned(self._serving.lost):
            return ""
        last = "" if self.trouble in ("", self._spent) else f", and the last failed: {self.trouble}"
        return f"it is not started again: {self._limit}{last}"

    @property
    def _limit(self) -> str:
        return f"recovery.restarts_per_hour allows {self._restarts.per_hour}"

    @property
    def _spent(self) -> str:
        return f"{self._limit}, and they were taken"

    @property
    def failure(self) -> str:
        """Why service has ended for good; "" if a group serves or may serve later."""
        watch = self._serving.watch
        # A new group serves before ``watch`` knows the group. So ``serves`` is checked before
        # ``watch.failure``, which might report that all known groups are lost.
        if self._serving.serves or watch.trouble:
            return watch.trouble
        failure, end = watch.failure(), self.ends_recovery
        return f"{failure}; {end}" if failure and end else ""

    def _look_for_service(self, now_s: float) -> None:
        self._on_service(self._serving.serves)

    def _sweep(self, now_s: float) -> None:
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + run_directory.SWEEP_S
            run_directory.sweep()
            self._serving.prepare_starter()

    # ---- groups that are missing

    def _look_for_missing(self, now_s: float) -> None:
        if not self._is_changing:
            self._give_back()
            is_left = bool(self._serving.num_missing) and self._restarts.is_left(now_s)
            self._serving.give_up_lost(are_replaced=is_left)
        if not self._serving.num_missing:
            self.trouble = ""
        elif self._is_changing or not self._restarts.is_due(now_s):
            return
        elif self._restarts.is_left(now_s):
            self._change = self._begin(self._replace)
        else:
            self._complain(self.trouble or self._spent)

    def _num_returned(self, lost: Sequence[LockstepGroup]) -> int:
        """Return the number of restarts that ``_give_back`` would add to the budget for these lost
        groups.
        """
        return sum(g.served_s >= SOUND_S and g.number not in self._seen_lost for g in lost)

    def _give_back(self) -> None:
        """Add one restart to the budget for each lost group that had served for at least
        ``SOUND_S``. Each lost group is handled once.

        A lasting fault ends every new group within ``SOUND_S``. The budget limits the restarts
        after such a fault. The restart of a group that served for longer was useful, and does not
        count.
        """
        lost = self._serving.lost
        for _ in range(self._num_returned(lost)):
            self._restarts.give_back()
        self._seen_lost = {group.number for group in lost}

    def _replace(self) -> None:
        """Start a missing group. If the start fails, a later call of ``look`` tries again."""
        has_begun = False
        try:
            self._serving.find_place()
            has_begun = self._restarts.spend(self._clock())
            assert has_begun, "looked at before"
            self._tell_restarts()
            self._serving.replace_one()
            self._tell_restarts()
        except Exception as e:  # catch any exception, because the other groups continue to serve
            if has_begun:
                self._restarts.failed(self._clock())
            else:
                self._restarts.could_not_begin(self._clock())
            self._complain(str(e))
        else:
            self._restarts.succeeded()
            self.trouble = ""

    def _tell_restarts(self) -> None:
        """Tell the engines about recent restarts, for /metrics."""
        self._serving.set_restarts(self._restarts.ages_s(self._clock()))

    def _complain(self, reason: str) -> None:
        if reason != self.trouble:
            self.trouble = reason
            event(
                logger,
                "groups_missing",
                logging.ERROR,
                missing=self._serving.num_missing,
                wanted=self._serving.num_wanted,
                cause=reason,
            )

    # ---- autoscaling

    def _autoscale(self, now_s: float) -> None:
        if self._autoscaler is None or now_s < self._next_count_s or self._is_changing:
            return
        self._next_count_s = now_s + COUNT_S
        taking = self._serving.taking
        if not taking:
            return  # missing groups are replaced first
        running, waiting = self._count_requests(taking)
        rows = min(group.num_rows for group in taking)
        demand = Demand(len(taking), running, waiting, rows, self._serving.num_missing)
        wanted = self._autoscaler.decide(now_s, demand)
        if wanted < len(taking) or (wanted > len(taking) and self._growth.is_due(now_s)):
            event(
                logger,
                "autoscale",
                before=len(taking),
                wanted=wanted,
                running=running,
                waiting=waiting,
            )
            self._change = self._begin(partial(self._scale, wanted))

    def _scale(self, count: int) -> None:
        try:
            # The call does not wait for free NPUs, because autoscaling tries again later.
            self._serving.scale(count, room_s=0.0)
        except (DistAclGraphError, RayError) as e:
            self._growth.failed(self._clock())
            pause_s = self._growth.pause_s(self._clock())
            logger.warning(
                "requests want %d groups; none is added for %.0f s, because the last try failed: "
                "%s",
                count,
                pause_s,
                e,
            )
        except Exception:  # catch any exception, because the groups continue to serve
            self._growth.failed(self._clock())
            logger.exception("changing the number of groups to %d failed", count)
        else:
            self._growth.succeeded()


class Demands:
    """The numbers of running and waiting requests that each group's engine last reported."""

    def __init__(self) -> None:
        self._asked: dict[int, Any] = {}
        self._said: dict[int, tuple[int, int]] = {}

    def look(self, groups: Sequence[LockstepGroup]) -> tuple[int, int]:
        """Return the number of running requests and the number of waiting requests of all groups,
        according to the engines' last answers. Then send a new question to each engine that has
        answered the previous question.
        """
        numbers = {group.number for group in groups}
        self._asked = {n: ref for n, ref in self._asked.items() if n in numbers}
        self._said = {n: said for n, said in self._said.items() if n in numbers}
        for group in groups:
            self._ask(group)
        running, waiting = zip(*self._said.values(), strict=True) if self._said else ((), ())
        return sum(running), sum(waiting)

    def _ask(self, group: LockstepGroup) -> None:
        ref = self._asked.get(group.number)
        if ref is not None:
            if not ray.wait([ref], timeout=0)[0]:
                return
            try:
                self._said[group.number] = ray.get(ref)
            except RayError:
                return  # the engine is dead, which the group watch will notice
        self._asked[group.number] = group.engine.demand.remote()
