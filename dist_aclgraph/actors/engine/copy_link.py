"""CopyLink: sends workers the copies of KV blocks that begin, and takes the ones that have ended.

A message goes out when copies begin, and while copies run, whenever all workers have answered the
last message. So workers continue their copies between steps, and never send anything on their own.
"""

from __future__ import annotations

import logging
import time

from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.logs import event
from dist_aclgraph.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class CopyLink:
    """Connects the scheduler's copies with the workers.

    Args:
        num_workers: number of workers that answer each message.
        timeout_s: if no copy ends for this time, requests stop waiting for copies, and are
            computed. The copies go on, because workers may still write to their blocks.
    """

    def __init__(
        self, scheduler: Scheduler, channel: StepSender, num_workers: int, timeout_s: float
    ) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._number = 0
        self._waits_for: set[int] = set()  # workers that have not answered the last message
        self._progress_s = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether a copy runs."""
        return self._scheduler.is_copying

    def turn(self, *, is_idle: bool) -> None:
        """Take the workers' answers, and send them the copies that begin.

        Args:
            is_idle: whether no step is in flight.
        """
        scheduler = self._scheduler
        if is_idle and scheduler.is_copying:
            self._channel.poll_copied()
        now_s = time.monotonic()
        for answer in self._channel.take_copied():
            if answer.epoch != scheduler.epoch:
                continue
            if answer.number == self._number:
                self._waits_for.discard(answer.rank)
            for number, num_whole in answer.ended:
                self._progress_s = now_s
                scheduler.end_copy(number, answer.rank, num_whole)
        jobs = scheduler.take_copies(is_idle=is_idle)
        if not scheduler.is_copying:
            self._progress_s = now_s
        elif now_s - self._progress_s > self._timeout_s:
            self._progress_s = now_s
            event(logger, "copies_are_late", logging.WARNING, requests=scheduler.stop_fetching())
        if any(jobs) or (scheduler.is_copying and not self._waits_for):
            self._number += 1
            self._waits_for = set(range(self._num_workers))
            self._channel.send_copies(scheduler.epoch, self._number, jobs)

    def reset(self) -> None:
        """Forget the last message, because workers have forgotten it."""
        self._waits_for.clear()
        self._progress_s = time.monotonic()
