"""The loop of a lockstep group: admits requests, decides and sends steps, delivers tokens.

The loop runs on one thread of the engine actor, and owns the scheduler and the step channel.
Another thread serves the clients (``client_links.py``). The loop delivers the tokens of step n
while the workers run step n + 1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.actors.capture.graph_changes import GraphChanges
from dist_aclgraph.actors.engine.copy_link import CopyLink
from dist_aclgraph.actors.engine.engine_report import LoopCounts, group_metrics, group_report
from dist_aclgraph.actors.engine.hand_overs import HandOvers
from dist_aclgraph.actors.engine.kv_events import KVEvents
from dist_aclgraph.actors.engine.late_decisions import LateDecisions
from dist_aclgraph.actors.engine.recipients import Recipients
from dist_aclgraph.actors.engine.resumption import Resumption
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.client_links import ClientLink, ClientLinks
from dist_aclgraph.actors.wire.messages import GroupList, Submit
from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.arrays.ints import INT_BYTES, unpack_ints
from dist_aclgraph.arrays.token_ids import check_token_ids
from dist_aclgraph.errors import (
    DeviceFaultError,
    DistAclGraphError,
    EngineDeadError,
    InvalidParameterError,
    WorkerLostError,
)
from dist_aclgraph.logs import event
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.rebucketing import Action
from dist_aclgraph.planning.step_line import LineFit
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import last_words
from dist_aclgraph.steps.step import Pause, StepPlan, StepResult

logger = logging.getLogger(__name__)

STOPPING = "the deployment is stopping"
IDLE_S = 0.1  # seconds between two checks while there is no work
COPYING_S = 0.002  # seconds between two checks while copy jobs run, but no step runs
UNHELD_S = 0.01  # seconds between two checks of the lease while the lease is not held
# A mean step time is reported after MEAN_FROM steps. It covers about the last MEAN_OF steps.
MEAN_FROM, MEAN_OF = 16, 200


@dataclass
class _Mean:
    """A running mean in which older values have less weight."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MEAN_OF)
        self.value += (value - self.value) / self.count


@dataclass(frozen=True)
class _Sent:
    """A step in flight.

    Attributes:
        delayed_s: how long the decision of the step waited for further requests, in seconds.
        schedule_s, send_s: how long the decision and the sending of the step took, in seconds.
        at_s: time when the step was sent.
    """

    plan: StepPlan
    delayed_s: float
    schedule_s: float
    send_s: float
    at_s: float


class EngineLoop:
    """State of a serving lockstep group.

    Args:
        vocab_size: number of token ids of the model; a prompt with another token id is refused.
        changes: an object that changes the group's graphs while the group serves.
        resumption: an object that resumes the group after a fault of a device or a link.
        report: a function that returns facts about the ranks; every report contains these facts.
        steps_in_flight: maximum number of sent steps whose results have not arrived.
        step_timeout_s: time limit of a step; a step that takes longer ends the epoch.
        turn_timeout_s: time limit of the loop's work between two waits; if the work takes longer,
            the loop counts as stuck. Waits have their own time limits.
        is_held: a function that returns whether this engine holds the group's lease. Without the
            lease, the engine sends nothing to workers or clients.
        kv_events: publishes the changes of the prefix caches; None if changes are not published.
            The loop closes this object when the group ends.
        fetches: fetches blocks from groups on other nodes; None if nothing is fetched.
        late_decisions: computes how long a decision may wait for further requests; None means that
            steps are decided at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        channel: StepSender,
        links: ClientLinks,
        *,
        vocab_size: int,
        step_timeout_s: float,
        turn_timeout_s: float,
        is_held: Callable[[], bool],
        steps_in_flight: int,
        changes: GraphChanges,
        resumption: Resumption,
        report: Callable[[], dict[str, Any]],
        kv_events: KVEvents | None = None,
        fetches: BlockFetches | None = None,
        late_decisions: LateDecisions | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._links = links
        self._vocab_size = vocab_size
        self._step_timeout_s = step_timeout_s
        self._turn_timeout_s = turn_timeout_s
        self.is_held = is_held
        self._steps_in_flight = steps_in_flight
        self._flying: deque[_Sent] = deque()
        self._received_s = 0.0  # time when the last result arrived
        self._late_decisions = late_decisions
        self._changes = changes
        self._resumption = resumption
        self._report = report
        self._recipients = Recipients()
        self._hand_overs = HandOvers(scheduler.copies, self._recipients)
        self._copies: CopyLink | None = None
        if scheduler.copies.ranks:
            self._copies = CopyLink(scheduler, channel, step_timeout_s)
        self._kv_events = kv_events
        self._fetches = fetches
        self._seen_s = time.monotonic()  # time when the loop last showed progress
        self._failure = ""
        self._has_dismissed = False
        self._stopping = False
        # Version of the group list in which this group drains; 0 if the group does not drain.
        self._drains_from = 0
        self._drained = threading.Event()
        self._timings_us: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._num_steps = 0
        self._step_times: defaultdict[BatchDescriptor, _Mean] = defaultdict(_Mean)
        self._eager_times = LineFit()
        self._num_tokens: Counter[str] = Counter()

    # ---- any thread

    def fail(self, reason: str) -> None:
        """End all requests, and refuse later requests. All these requests get errors with
        ``reason``.
        """
        if not (self._failure or self._stopping):
            event(logger, "epoch_failed", logging.ERROR, step=self._num_steps, cause=reason)
        self._failure = self._failure or reason
        self._links.wake()

    def failure_now(self) -> str:
        """Return why the group has ended; "" while it serves."""
        stuck_s = time.monotonic() - self._seen_s
        # After a stop of the process (SIGSTOP), the lease is not held. The loop counts as stuck
        # only while the lease is held.
        if not self._failure and stuck_s > self._turn_timeout_s and self.is_held():
            return f"the engine's loop has been stuck on its host for {stuck_s:.1f} s"
        return self._failure

    def pause_now(self) -> str:
        """Return why the group is paused; "" if steps run, or in the first second of a pause."""
        return self._resumption.pause_now()

    def stop(self) -> None:
        self._stopping = True

    def wait_for_end(self) -> str:
        """Wait until the loop has ended, and return the reason."""
        while not (reason := self.failure_now()) and not self._stopping:
            time.sleep(IDLE_S)
        return reason or STOPPING

    def set_groups(self, groups: GroupList) -> None:
        """Send the deployment's list of groups to all clients."""
        self._links.set_groups(groups)
        if self._fetches is not None:
            self._fetches.set_groups(groups)

    def drain(self, version: int, timeout_s: float) -> bool:
        """Wait until all requests have ended, and all clients use this version of the group list.

        The group list of this version marks this group as draining. So clients that use the list
        send no requests to this engine. Returns False if the wait takes longer than ``timeout_s``.
        """
        self._drains_from = version
        return self._drained.wait(timeout_s)

    def change_plan(self, plan: GraphPlan, actions: Sequence[Action]) -> None:
        """Change to another graph plan, one graph at a time; see ``GraphChanges``."""
        self._changes.change_plan(plan, actions)

    @property
    def plan(self) -> GraphPlan | None:
        """The current graph plan; None while the plan changes."""
        return None if self._changes.is_changing else self._scheduler.dispatcher.plan

    def take_traffic(self) -> Traffic:
        """Return how many batches of each size ran since the last call."""
        return self._scheduler.dispatcher.take_traffic()

    def demand(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait."""
        stats = self._scheduler.stats()
        return stats["running"], stats["waiting"]

    def step_seconds(self) -> dict[BatchDescriptor, float]:
        """Return the mean step time for each graph that was replayed often enough."""
        means = list(self._step_times.items())
        return {graph: mean.value for graph, mean in means if mean.count >= MEAN_FROM}

    def eager_times(self) -> dict[str, float]:
        """Return a linear fit of the times of eager steps: a base time, and a time per token, in
        seconds. Return an empty dictionary if there were too few steps.
        """
        if self._eager_times.count < MEAN_FROM:
            return {}
        base_s, token_s = self._eager_times.line()
        return {
            "steps": self._eager_times.count,
            "base_seconds": base_s,
            "token_seconds": token_s,
        }

    # ---- the loop's thread

    def run(self) -> None:
        """Serve until the loop is stopped. If the epoch fails, send errors to clients."""
        outputs = StepOutputs()
        self._links.start(self)
        try:
            while not self._stopping:
                self._seen_s = time.monotonic()
                if not self.is_held():
                    time.sleep(UNHELD_S)
                    continue
                if self._failure:
                    self._serve_failure()
                    self._dismiss_workers()
                    continue
                is_last = self._drains_from and self._links.have_confirmed(self._drains_from)
                try:
                    outputs = self._turn(outputs)
                    is_idle = not (self._scheduler.has_work or self._hand_overs)
                    if is_last and not len(outputs) and is_idle:
                        self._drained.set()
                except DeviceFaultError as e:
                    outputs = self._resume(e)
                except DistAclGraphError as e:
                    self.fail(str(e))
                except Exception as e:  # catch any exception, because clients must get the reason
                    self.fail(f"{type(e).__name__}: {e}")
        finally:
            self._dismiss_workers()
            self._end_requests(STOPPING)
            self._links.close()

    def _turn(self, outputs: StepOutputs) -> StepOutputs:
        """Decide a step, deliver ``outputs``, and return the outputs of a finished step."""
        began_s = time.perf_counter()
        self._take(0)
        is_due = self._changes.is_due(
            not self._scheduler.has_work, not self._scheduler.waiting.queue
        )
        if is_due and not self._flying:
            # Deliver before a capture, so that no token waits for the capture.
            self._deliver(outputs)
            outputs = StepOutputs()
            self._changes.advance()
        while not is_due and (left_s := began_s + self._delay_s() - time.perf_counter()) > 0:
            self._deliver(outputs)  # deliver now, because the next line waits for new requests
            outputs = StepOutputs()
            self._take(left_s)
        start_s = time.perf_counter()
        if self._copies is not None:
            self._copies.take_answers()
        plan = None if is_due and self._flying else self._scheduler.schedule()
        scheduled_s = time.perf_counter()
        if plan is not None:
            self._channel.send(plan)
            sent_s = time.perf_counter()
            schedule_s, send_s = scheduled_s - start_s, sent_s - scheduled_s
            self._flying.append(_Sent(plan, start_s - began_s, schedule_s, send_s, sent_s))
            for request in self._scheduler.admitted:
                request.admitted_s = scheduled_s
        elif self._flying:
            self._channel.send(Pause(self._scheduler.epoch))
        self._deliver(outputs)  # deliver now, because the next calls can raise an error
        wait_s = IDLE_S
        if self._copies is not None:
            self._copies.turn(is_idle=not self._flying)
            wait_s = COPYING_S if self._copies.is_busy else IDLE_S
        for link, deltas in self._hand_overs.take_ready():
            self._links.send(link, deltas)
        if not self._flying:
            self._take(wait_s)
            return StepOutputs()
        if plan is not None and len(self._flying) < self._steps_in_flight:
            return StepOutputs()
        return self._land()

    def _delay_s(self) -> float:
        """Return how long the decision of the next step may wait for further requests."""
        late, is_copying = self._late_decisions, self._copies is not None and self._copies.is_busy
        if late is None or not self._flying or is_copying or self._failure or self._stopping:
            return 0.0
        return late.delay_s(self._flying[0].plan)

    def _land(self) -> StepOutputs:
        """Wait for the results of the oldest step in flight; return the step's outputs."""
        sent = self._flying.popleft()
        plan = sent.plan
        results = self._channel.receive(plan, self._step_timeout_s, self.raise_if_dead)
        received_s = time.perf_counter()
        outputs = self._hand_overs.keep(self._scheduler.update(results))
        if self._kv_events is not None:
            self._kv_events.publish()
        done_s = time.perf_counter()
        for index in outputs.firsts.tolist():
            request = outputs.requests[index]
            request.prefill_s = received_s - request.admitted_s
        took_s = received_s - max(sent.at_s, self._received_s)
        self._received_s = received_s
        if self._late_decisions is not None and self._flying:
            waited_s = min(result.waited_us for result in results) / 1e6
            self._late_decisions.note(plan, self._flying[0].delayed_s, waited_s)
        self._num_steps += 1
        self._resumption.note_step()
        if plan.graph is not None:
            self._step_times[plan.graph].add(took_s)
        else:
            self._eager_times.add(plan.largest.num_tokens, took_s)
        self._num_tokens["generation"] += outputs.num_tokens
        for failed, error in outputs.failed:
            link, number = self._recipients.pop(failed.request_id)
            self._links.send(link, last_words(number, error))
        first = next(result for result in results if result.rank == 0)
        if first.timings_us:
            self._book(sent, first, took_s, done_s - received_s)
        return outputs

    def _resume(self, error: DeviceFaultError) -> StepOutputs:
        """Try to resume the group. Return empty outputs, because interrupted steps run again."""
        try:
            comeback = self._resumption.run(error, self._scheduler.epoch, self.raise_if_dead)
        except DistAclGraphError as e:
            self.fail(str(e))
        else:
            self._flying.clear()
            self._scheduler.rewind(comeback.epoch)
            if self._copies is not None:
                self._copies.reset()
            if not comeback.keeps_kv:
                self._scheduler.lose_kv()
        return StepOutputs()

    def raise_if_dead(self) -> None:
        """Raise an error if a worker is lost or the loop stops. The error ends the wait for a step.

        Raises:
            WorkerLostError: a worker is lost.
            EngineDeadError: the deployment is stopping.
        """
        self._seen_s = time.monotonic()
        if self._failure:
            raise WorkerLostError(self._failure)
        if self._stopping:
            raise EngineDeadError(STOPPING)

    def _book(self, sent: _Sent, result: StepResult, took_s: float, update_s: float) -> None:
        """Add a step's host times (microseconds) and counters to the sums for the step's mode."""
        graph = sent.plan.graph
        mode = "eager" if graph is None else graph.mode.lower()
        worker_us = sum(result.timings_us.values())
        stages = {
            "schedule": sent.schedule_s * 1e6,
            # The workers' time can be longer than the step, because a worker begins a step before
            # it sends the result of the previous step.
            "message": max(0.0, (sent.send_s + took_s) * 1e6 - worker_us),
            "result": update_s * 1e6,
            **result.timings_us,
            **result.overlapped_us,
        }
        for stage, duration_us in stages.items():
            self._timings_us[f"{mode}.{stage}"] += duration_us  # type: ignore[assignment]
        self._timings_us[f"{mode}.steps"] += 1
        self._counted.update({f"{mode}.{what}": n for what, n in result.counted.items()})

    # ---- clients

    def _take(self, timeout_s: float) -> None:
        """Handle all messages from clients; wait up to ``timeout_s`` for the first message."""
        for link, wish in self._links.next_events(timeout_s):
            if isinstance(wish, Submit):
                self._submit(link, wish)
            elif wish is not None:
                self._abort(link, wish.request_id)
            else:
                for request_id in self._recipients.remove_link(link):
                    self._scheduler.abort(request_id)

    def _abort(self, link: ClientLink, request_id: str) -> None:
        if self._recipients.is_owner(link, request_id):
            self._recipients.remove(request_id)
            self._scheduler.abort(request_id)

    def _submit(self, link: ClientLink, submit: Submit) -> None:
        try:
            if self._failure:
                raise EngineDeadError(self._failure)
            if len(submit.prompt) % INT_BYTES:
                raise InvalidParameterError("the prompt's bytes are not an int32 array", "prompt")
            prompt = unpack_ints(submit.prompt)
            check_token_ids(prompt, self._vocab_size, "prompt")
            request = Request(
                submit.request_id,
                prompt,
                submit.sampling,
                max_tokens=submit.max_tokens,
                stop_token_ids=submit.stop_token_ids,
                cache_salt=submit.cache_salt,
                hands_over=submit.hands_over and self._copies is not None,
            )
            if (source := submit.peer or submit.source) and self._fetches is not None:
                request.fetch, request.source = self._fetches.ways_from(
                    source, lambda: not request.is_over
                )
            self._scheduler.add(request)
        except DistAclGraphError as e:
            self._links.send(link, last_words(submit.number, e))
            return
        request.key = self._recipients.add(submit.request_id, link, submit.number)
        self._num_tokens["prompt"] += request.num_prompt_tokens

    def _deliver(self, outputs: StepOutputs) -> None:
        """Send each client one message with the tokens of all its requests."""
        for link, deltas in self._recipients.hand_out(outputs):
            self._links.send(link, deltas)

    def _dismiss_workers(self) -> None:
        """Tell workers to leave their step loops. Only the first call has an effect."""
        if not self._has_dismissed:
            self._has_dismissed = True
            self._channel.close(self._scheduler.epoch)
            if self._kv_events is not None:
                self._kv_events.close()

    def _serve_failure(self) -> None:
        """End all running requests, and refuse later requests."""
        self._scheduler.abort_all("error")
        self._end_requests(self._failure)
        self._take(IDLE_S)
        if self._drains_from:
            self._drained.set()

    def _end_requests(self, reason: str) -> None:
        for link, number in self._recipients.remove_all():
            self._links.send(link, last_words(number, EngineDeadError(reason)))

    # ---- answers to queries of clients

    def metrics(self) -> dict[str, Any]:
        """Return the counters and gauges of this group, for /metrics."""
        tokens = self._num_tokens
        resumptions = dict(self._resumption.counts)
        copies = ({}, {}) if (c := self._copies) is None else (c.num_read(), c.fetched())
        counts = LoopCounts(
            tokens["prompt"], tokens["generation"], self._num_steps, resumptions, *copies
        )
        return group_metrics(self._scheduler, counts, dict(self._changes.costs), self._report())

    def report(self) -> dict[str, Any]:
        """Return the plan, the buckets with their counters, and facts about the ranks; see
        ``LLM.report``.
        """
        ranks_report = self._report()
        return {
            **ranks_report,
            **group_report(self._scheduler, dict(self._changes.costs), self.step_seconds()),
            "eager_times": self.eager_times(),
            "rollbacks": [*ranks_report.get("rollbacks", []), *self._changes.failures],
            "metrics": self.metrics(),
            "timings_us": dict(self._timings_us),
            "counted": dict(self._counted),
        }
