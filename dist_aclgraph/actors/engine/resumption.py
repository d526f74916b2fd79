"""Resumes a group after a fault of a device, or of a link between devices, if all processes are
alive.

First, the control thread of each rank aborts the work on the rank's device. The rank's step thread
cannot abort the work, because the step thread may be waiting for the device. After all ranks have
aborted their work, each rank resumes its device and its communicators, and reports to the engine.
Weights, KV and graphs stay valid. The engine decides the interrupted steps again, so requests keep
their progress. But if a part of the KV was in faulty memory, requests are computed again from their
first token. If resuming fails or a rank takes too long, the group's epoch ends. A worker's death
has the same effect.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.errors import DeviceFault, DeviceFaultError, WorkerLostError
from dist_aclgraph.logs import event
from dist_aclgraph.planning.way_back import SOUND_STEPS, Failure, way_back
from dist_aclgraph.steps.step import Resume
from dist_aclgraph.topology import GroupRank, WorldRank

# A function that stops the devices of all ranks. Its arguments are a time limit in seconds, and a
# check that is called several times a second during the wait. The result contains a reason for each
# rank whose device did not stop.
StopDevices = Callable[[float, Callable[[], None]], Mapping[GroupRank, str]]

MOMENT_S = 1.0  # a pause of more than this many seconds is reported

logger = logging.getLogger(__name__)


class Comeback(NamedTuple):
    """How a group was resumed.

    Attributes:
        epoch: the group's next epoch.
        keeps_kv: whether the KV cache is intact.
    """

    epoch: int
    keeps_kv: bool


class Resumption:
    """Resumes the group. Counts the resumptions, and decides whether the group may be resumed
    again.

    Attributes:
        counts: for each kind of fault, how many times the group was resumed after such a fault.

    Args:
        stop: a function that stops the devices of all ranks (``StopDevices``).
        timeout_s: time limit for resuming, in seconds. If 0, the group is never resumed.
    """

    def __init__(
        self,
        channel: StepSender,
        world_ranks: Sequence[WorldRank],
        stop: StopDevices,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._world_ranks = tuple(world_ranks)
        self._stop = stop
        self._timeout_s = timeout_s
        self._in_a_row = 0
        self._num_sound = 0  # number of successful steps since the last failure
        # The time when the group stopped, and the reason; None while the group runs.
        self._begun: tuple[float, str] | None = None
        self.counts: Counter[DeviceFault] = Counter()

    def pause_now(self) -> str:
        """Return why the group is paused; "" if steps run, or in the first ``MOMENT_S`` of a pause.
        Thread-safe.
        """
        begun = self._begun
        if begun is None or time.monotonic() - begun[0] < MOMENT_S:
            return ""
        return f"the group comes back from a failure, and goes on where it was: {begun[1]}"

    def note_step(self) -> None:
        self._num_sound += 1
        if self._num_sound == SOUND_STEPS:
            self._in_a_row = 0

    def run(self, error: DeviceFaultError, epoch: int, check: Callable[[], None]) -> Comeback:
        """Resume the group in its next epoch. The workers begin this epoch with an empty batch.

        Args:
            error: the error that the first failed rank has reported.
            check: a function that is called again and again during a wait, and can raise an error
                to end the wait.

        Raises:
            WorkerLostError: the group cannot be resumed.
        """
        self._begun = time.monotonic(), str(error)
        try:
            return self._come_back(error, epoch, check)
        finally:
            self._begun = None

    def _come_back(
        self, error: DeviceFaultError, epoch: int, check: Callable[[], None]
    ) -> Comeback:
        begin_s = time.monotonic()
        faults = {GroupRank(self._world_ranks.index(WorldRank(error.rank))): error.fault}
        may_resume = self._timeout_s > 0
        known = Failure(faults, in_a_row=self._in_a_row, may_resume=may_resume)
        if way_back(known) == "REBUILD":
            raise error
        deadline_s = begin_s + self._timeout_s

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        silent = self._stop(self._timeout_s, check)
        known = Failure(faults, frozenset(silent), self._in_a_row, may_resume)
        way = way_back(known)
        if way == "REBUILD":
            raise self._failed(error, silent)
        keeps_kv = way == "RESUME"
        self._channel.send(Resume(epoch, epoch + 1, keeps_kv))
        if silent := self._channel.receive_resumed(epoch + 1, left_s(), check):
            raise self._failed(error, silent)
        self._in_a_row += 1
        self._num_sound = 0
        self.counts[error.fault] += 1
        event(
            logger,
            "group_resumed",
            logging.WARNING,
            epoch=epoch + 1,
            seconds=time.monotonic() - begin_s,
            keeps_kv=keeps_kv,
            cause=str(error),
        )
        return Comeback(epoch + 1, keeps_kv)

    def _failed(self, error: DeviceFaultError, reasons: Mapping[GroupRank, str]) -> WorkerLostError:
        rank, reason = min(reasons.items())
        return WorkerLostError(
            f"it did not come back ({reason}) after {error}", self._world_ranks[rank], "SERVING"
        )
