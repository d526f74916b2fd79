"""CopyLink: sends copy jobs to the workers, and receives the jobs' results.

The link sends a message when jobs begin. While jobs run, the link also sends messages between the
steps; at most two messages are unanswered at a time. When a worker receives such a message between
two steps, the worker continues its jobs. Workers send only answers to these messages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.logs import event
from dist_aclgraph.scheduler.file_upkeep import TOUCH_S
from dist_aclgraph.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class CopyLink:
    """Sends the scheduler's copy jobs to the workers, and reports the workers' results to the
    scheduler.

    Args:
        timeout_s: time limit in seconds. If no job of a data-parallel rank ends in this time, the
            rank's requests stop waiting for copies. The model then computes the tokens of these
            requests. The blocks of the jobs stay reserved, because workers may still write to these
            blocks.
    """

    def __init__(self, scheduler: Scheduler, channel: StepSender, timeout_s: float) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._timeout_s = timeout_s
        self._number = 0
        self._num_read: dict[int, dict[str, int]] = {}  # last known ``num_read`` of each worker
        self._fetched: dict[int, dict[str, int]] = {}  # last known ``fetched`` of each worker
        self._answered = [0] * channel.num_workers  # last message answered by each worker
        self._touched_s = time.monotonic()
        # for each data-parallel rank, the last known number of its ended copy jobs
        self._num_ended = [0] * len(scheduler.copies.ranks)
        # for each data-parallel rank, the time at which a copy job last ended
        self._progress_s = [self._touched_s] * len(scheduler.copies.ranks)

    @property
    def is_busy(self) -> bool:
        """Whether a copy job runs, or a worker searches for files."""
        return self._scheduler.copies.is_running or self._scheduler.copies.is_looking

    def num_read(self) -> dict[str, int]:
        """Return how many blocks were read from each tier. The keys are the names of the tiers. If
        several workers read parts of the same blocks, only one of these workers is counted. Any
        thread may call this.
        """
        found: Counter[str] = Counter()
        for rank in self._scheduler.owners:
            found.update(self._num_read.get(rank, {}))
        return dict(found)

    def fetched(self) -> dict[str, int]:
        """Return the counts of ``FetchCounts``, summed over all workers that fetch files. Any
        thread may call this.
        """
        found: Counter[str] = Counter()
        for counts in list(self._fetched.values()):
            found.update(counts)
        return dict(found)

    def take_answers(self) -> None:
        """Apply the workers' answers that have arrived. Call this method before the decision of a
        step. Then this step can run the requests whose blocks have been read.
        """
        scheduler = self._scheduler
        for answer in self._channel.take_copied():
            self._num_read[answer.rank] = answer.num_read
            self._fetched[answer.rank] = answer.fetched
            if answer.epoch != scheduler.epoch:
                continue
            self._answered[answer.rank] = answer.number
            for number, num_whole in answer.ended:
                scheduler.copies.end(number, answer.rank, num_whole)

    def turn(self, *, is_idle: bool) -> None:
        """Apply the workers' answers. If the next message to the workers is due, send the message.

        Args:
            is_idle: whether no step is in flight.

        Raises:
            WorkerLostError: a worker failed while no step is in flight; the error names the rank.
        """
        scheduler = self._scheduler
        if is_idle and scheduler.copies.is_running:
            self._channel.poll_copied(scheduler.epoch)
        self.take_answers()
        now_s = time.monotonic()
        may_touch = now_s - self._touched_s >= TOUCH_S
        if may_touch:
            self._touched_s = now_s
        jobs = scheduler.copies.take_jobs(is_idle=is_idle, may_touch=may_touch)
        self._give_up_late(now_s)
        # While a step is in flight, the answer to the last message arrives only after the next
        # decision. So the link sends the next message before this answer arrives. Otherwise,
        # workers would continue their jobs only in every second step.
        num_unanswered = self._number - min(self._answered)
        is_due = num_unanswered == 0 or (num_unanswered == 1 and not is_idle)
        if any(jobs) or (scheduler.copies.is_running and is_due):
            self._number += 1
            self._channel.send_copies(scheduler.epoch, self._number, jobs)

    def _give_up_late(self, now_s: float) -> None:
        """If no job of a rank has ended for ``timeout_s``, the rank's requests stop waiting for
        jobs.

        A job counts as ended when all workers have ended the job. So one slow worker suffices to
        exceed the time limit.
        """
        for rank, copies in enumerate(self._scheduler.copies.ranks):
            if not copies.num_running or copies.num_ended != self._num_ended[rank]:
                self._num_ended[rank], self._progress_s[rank] = copies.num_ended, now_s
            elif now_s - self._progress_s[rank] > self._timeout_s:
                self._progress_s[rank] = now_s
                freed = self._scheduler.copies.stop_fetching(rank)
                event(logger, "copies_are_late", logging.WARNING, dp_rank=rank, requests=freed)

    def reset(self) -> None:
        """Expect no answers to earlier messages, because the workers have dropped all jobs."""
        self._answered = [self._number] * len(self._answered)
        self._progress_s = [time.monotonic()] * len(self._progress_s)
