"""The loop of one lockstep group: take requests in, decide a step, send it, hand its tokens out.

Runs on one thread of the engine actor and owns the scheduler, the step channel and the clients'
socket. What step n brought is handed to the clients while the workers run step n + 1.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from dist_aclgraph.actors.engine_report import LoopCounts, group_metrics, group_report
from dist_aclgraph.actors.graph_changes import GraphChanges
from dist_aclgraph.actors.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Deltas,
    FromEngine,
    Hello,
    Query,
    Refused,
    Submit,
    answer,
    encoder,
    to_engine_decoder,
)
from dist_aclgraph.actors.step_channel import StepSender
from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineDeadError,
    InvalidParameterError,
    WorkerLostError,
)
from dist_aclgraph.ints import INT_BYTES, unpack_ints
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.rebucketing import Action
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import StepPlan, StepResult

IDLE_POLL_MS = 100
MEAN_OF = 200  # steps

Client = bytes  # ZeroMQ routing id


@dataclass
class _Mean:
    """A running mean that forgets slowly."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MEAN_OF)
        self.value += (value - self.value) / self.count


class EngineLoop:
    """State of a serving lockstep group.

    Args:
        changes: what becomes of the group's graphs while it serves.
        report: what the controller knows of the ranks; part of every report.
        step_timeout_s: a step that takes longer ends the epoch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        channel: StepSender,
        *,
        address: str,
        token: str,
        step_timeout_s: float,
        changes: GraphChanges,
        report: dict[str, Any],
    ) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._token = token
        self._step_timeout_s = step_timeout_s
        self._changes = changes
        self._report = report
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(address)
        self._known: set[Client] = set()
        self._client_of: dict[str, Client] = {}
        self._failure = ""
        self._stopping = False
        self._timings_us: Counter[str] = Counter()
        self._num_steps = 0
        self._step_times: defaultdict[BatchDescriptor, _Mean] = defaultdict(_Mean)
        self._num_tokens: Counter[str] = Counter()

    # ---- any thread

    def fail(self, reason: str) -> None:
        """Say that a worker is gone: every request ends with this reason, and so do later ones."""
        self._failure = self._failure or reason

    def stop(self) -> None:
        self._stopping = True

    def change_plan(self, plan: GraphPlan, actions: Sequence[Action]) -> None:
        """Move to another graph plan, in quiet steps."""
        self._changes.change_plan(plan, actions)

    @property
    def plan(self) -> GraphPlan | None:
        """The graph plan that holds, or None while it changes."""
        return None if self._changes.is_changing else self._scheduler.dispatcher.plan

    def take_traffic(self) -> Traffic:
        """Return how often batches of each size ran since the last call."""
        return self._scheduler.dispatcher.take_traffic()

    def step_seconds(self) -> dict[BatchDescriptor, float]:
        """Return how long a step takes that replays each graph, on average."""
        return {graph: mean.value for graph, mean in list(self._step_times.items())}

    @property
    def failure(self) -> str:
        return self._failure

    # ---- the loop's thread

    def run(self) -> None:
        """Serve until stopped. A failed epoch keeps answering clients, with errors."""
        outputs = StepOutputs()
        try:
            while not self._stopping:
                if self._failure:
                    self._serve_failure()
                    continue
                try:
                    outputs = self._turn(outputs)
                except DistAclGraphError as e:
                    self.fail(str(e))
                except Exception as e:  # Clients must hear of it, whatever it is.
                    self.fail(f"{type(e).__name__}: {e}")
        finally:
            self._channel.close(self._scheduler.epoch)
            self._socket.close()
            self._context.term()

    def _turn(self, outputs: StepOutputs) -> StepOutputs:
        """Run one step, and hand out the outputs of the one before meanwhile."""
        self._receive_all(0)
        if self._changes.is_due(not self._scheduler.has_work, not self._scheduler.waiting):
            self._deliver(outputs)  # nobody waits for a capture with a token that is there
            outputs = StepOutputs()
            self._changes.advance()
        start_s = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan is None:
            self._deliver(outputs)
            self._receive_all(IDLE_POLL_MS)
            return StepOutputs()
        scheduled_s = time.perf_counter()
        self._channel.send(plan)
        sent_s = time.perf_counter()
        self._deliver(outputs)
        results = self._channel.receive(plan, self._step_timeout_s, self.check)
        received_s = time.perf_counter()
        outputs = self._scheduler.update(results)
        done_s = time.perf_counter()
        self._num_steps += 1
        if plan.graph is not None:
            self._step_times[plan.graph].add(received_s - sent_s)
        self._num_tokens["generation"] += outputs.num_tokens
        first = next(result for result in results if result.rank == 0)
        if first.timings_us:
            self._book(plan, first, scheduled_s - start_s, sent_s - scheduled_s,
                       received_s - sent_s, done_s - received_s)  # fmt: skip
        return outputs

    def check(self) -> None:
        """While a step runs: end the wait when a worker is known to be gone.

        Raises:
            WorkerLostError: it is.
        """
        if self._failure:
            raise WorkerLostError(self._failure)
        if self._stopping:
            raise EngineDeadError("the deployment is stopping")

    def _book(
        self,
        plan: StepPlan,
        result: StepResult,
        schedule_s: float,
        send_s: float,
        wait_s: float,
        update_s: float,
    ) -> None:
        """Add one step's host times, in microseconds, split by mode."""
        mode = "eager" if plan.graph is None else plan.graph.mode.lower()
        worker_us = sum(result.timings_us.values())
        stages = {
            "schedule": schedule_s * 1e6,
            "message": send_s * 1e6 + wait_s * 1e6 - worker_us,
            "result": update_s * 1e6,
            **result.timings_us,
            **result.beside_us,
        }
        for stage, duration_us in stages.items():
            self._timings_us[f"{mode}.{stage}"] += duration_us  # type: ignore[assignment]
        self._timings_us[f"{mode}.steps"] += 1

    # ---- clients

    def _receive_all(self, timeout_ms: int) -> None:
        """Take in all that clients have sent; wait up to ``timeout_ms`` for the first message."""
        while self._socket.poll(timeout_ms):
            client, *frames = self._socket.recv_multipart()
            timeout_ms = 0
            try:
                message = to_engine_decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as e:
                self._send(client, Refused(f"not a message of ours: {e}"))
                continue
            if isinstance(message, Hello):
                self._welcome(client, message)
            elif client in self._known:
                self._serve(client, message)

    def _welcome(self, client: Client, hello: Hello) -> None:
        if secrets.compare_digest(hello.token.encode(), self._token.encode()):
            self._known.add(client)
        else:
            self._send(client, Refused("wrong token"))

    def _serve(self, client: Client, message: Submit | Abort | Query) -> None:
        if isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Abort):
            if self._client_of.pop(message.request_id, None) is not None:
                self._scheduler.abort(message.request_id)
        else:
            bodies: dict[str, Callable[[], dict[str, Any]]] = {
                "health": self.health,
                "report": self.report,
                "metrics": self.metrics,
            }
            self._send(client, answer(message, bodies[message.what]()))

    def _submit(self, client: Client, submit: Submit) -> None:
        try:
            if self._failure:
                raise EngineDeadError(self._failure)
            if len(submit.prompt) % INT_BYTES:
                raise InvalidParameterError("the prompt's bytes are no int32 array", "prompt")
            request = Request(
                submit.request_id,
                unpack_ints(submit.prompt),
                submit.sampling,
                max_tokens=submit.max_tokens,
                stop_token_ids=submit.stop_token_ids,
                cache_salt=submit.cache_salt,
            )
            self._scheduler.add(request)
        except DistAclGraphError as e:
            delta = RequestDelta(
                submit.request_id,
                finish_reason="error",
                error=str(e),
                error_kind=type(e).__name__,
            )
            self._send(client, Deltas((delta,), *self._now))
            return
        self._client_of[submit.request_id] = client
        self._num_tokens["prompt"] += request.num_prompt_tokens

    def _deliver(self, outputs: StepOutputs) -> None:
        """Send each client one message with the tokens of all its requests."""
        by_client: defaultdict[Client, list[RequestDelta]] = defaultdict(list)
        for delta in outputs:
            client = self._client_of.get(delta.request_id)
            if client is None:
                continue
            if delta.finish_reason is not None:
                del self._client_of[delta.request_id]
            by_client[client].append(delta)
        for client, deltas in by_client.items():
            self._send(client, Deltas(tuple(deltas), *self._now))

    def _serve_failure(self) -> None:
        """End what runs, and answer whoever still asks."""
        self._scheduler.abort_all("error")
        for request_id, client in self._client_of.items():
            delta = RequestDelta(
                request_id,
                finish_reason="error",
                error=self._failure,
                error_kind=EngineDeadError.__name__,
            )
            self._send(client, Deltas((delta,), *self._now))
        self._client_of.clear()
        self._receive_all(IDLE_POLL_MS)

    @property
    def _now(self) -> tuple[int, int]:
        """Epoch and step that a message to a client belongs to."""
        return self._scheduler.epoch, self._scheduler.step

    def _send(self, client: Client, message: FromEngine) -> None:
        self._socket.send_multipart([client, encoder.encode(message)])

    # ---- what clients may ask

    def health(self) -> dict[str, Any]:
        return {"ok": not self._failure, "error": self._failure}

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges of this group, for /metrics."""
        tokens = self._num_tokens
        counts = LoopCounts(tokens["prompt"], tokens["generation"], self._num_steps)
        return group_metrics(self._scheduler, counts, dict(self._changes.costs), self._report)

    def report(self) -> dict[str, Any]:
        """Plan, buckets with their counters, eager steps by reason, ranks: see ``LLM.report``."""
        return {
            **self._report,
            **group_report(self._scheduler, dict(self._changes.costs), self.step_seconds()),
            "rollbacks": [*self._report.get("rollbacks", []), *self._changes.failures],
            "metrics": self.metrics(),
            "timings_us": dict(self._timings_us),
        }
