"""EngineClient: how an ingress, or an LLM object, talks to the engines of a deployment.

One I/O thread owns all sockets. A request lives on one engine from submit to its last delta; a link
that is lost ends all its requests with an error, here and in the engine, so that nobody hangs.
Another one is opened in its place, and the engine is used again once it answers.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import zmq

from dist_aclgraph.actors.addresses import Endpoint
from dist_aclgraph.actors.engine_link import BEATS_OF_A_SILENCE, EngineLink
from dist_aclgraph.actors.messages import (
    Abort,
    Answer,
    Deltas,
    Goodbye,
    Hello,
    Query,
    QueryKind,
    Submit,
    ToEngine,
    failed,
)
from dist_aclgraph.actors.sockets import Wakeup
from dist_aclgraph.config import Config
from dist_aclgraph.errors import DistAclGraphError, EngineDeadError, InvalidParameterError
from dist_aclgraph.ints import IntArray, pack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.steps.delta import RequestDelta

NUMBERS = 1 << 31  # of requests on one engine, before they begin again
OnDelta = Callable[[RequestDelta], None]

STOPPING = "the service is stopping"

logger = logging.getLogger(__name__)


class Deployment(Protocol):
    """What an ingress or an LLM needs of a running deployment."""

    addresses: list[Endpoint]
    token: str
    max_model_len: int

    def report(self) -> dict[str, Any]:
        """Return plan, buckets with their counters, eager steps by reason, ranks and memory."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the deployment does not serve."""
        ...

    def shut_down(self) -> None:
        """Stop all that was started."""
        ...


StartDeployment = Callable[[Config], Deployment]


@dataclass(eq=False)
class _Engine:
    """One engine. The client's lock guards ``requests``, ``queries`` and ``dead_because``."""

    open_link: Callable[[], EngineLink]
    dead_because: str = ""
    requests: dict[str, OnDelta] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # request ids, by their numbers here
    num_submitted: int = 0
    queries: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link = self.open_link()


class EngineClient:
    """Owns the connections to the engines. Knows token ids only, no text.

    Args:
        addresses: of the engines, one per lockstep group, as this process sees them.
        token: the deployment's connection token.
        link_s: silence after which an engine counts as dead: ``timeouts.link_s``.
    """

    def __init__(self, addresses: Sequence[Endpoint], token: str, *, link_s: float) -> None:
        if not addresses:
            raise EngineDeadError("the deployment has no engine")
        self._lock = threading.Lock()
        self._query_ids = itertools.count(1)
        self._commands: queue.SimpleQueue[tuple[_Engine, ToEngine]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(token, secrets.token_hex(8))
        self._engines = [
            _Engine(partial(EngineLink, self._context, address, hello, link_s))
            for address in addresses
        ]
        self._beat_s = link_s / BEATS_OF_A_SILENCE
        self._owner: dict[str, tuple[_Engine, int]] = {}  # and the request's number there
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int] | IntArray,
        params: SamplingParams,
        stop_ids: Sequence[int],
        on_delta: OnDelta,
        *,
        seed: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Give a request to the engine with the fewest outstanding ones.

        Args:
            params: ``max_tokens`` must be set; the caller knows the context's end.
            stop_ids: all token ids that end the output.
            on_delta: called on the I/O thread, in order, until a delta has a finish reason.
            seed: used where ``params`` brings none.
            cache_salt: cached blocks are shared with requests of the same salt only.

        Raises:
            EngineDeadError: no engine is alive.
            InvalidParameterError: the id is in use, or ``max_tokens`` is not set.
        """
        if params.max_tokens is None:
            raise InvalidParameterError("max_tokens must be set before submission", "max_tokens")
        sampling = row_sampling(
            params, seed=seed, num_prompt_tokens=len(prompt_ids), end_ids=stop_ids
        )
        prompt = pack_ints(prompt_ids)
        with self._lock:
            if request_id in self._owner:
                raise InvalidParameterError(f"request id {request_id!r} is in use", "request_id")
            alive = [engine for engine in self._engines if not engine.dead_because]
            if not alive or self._closing.is_set():
                raise EngineDeadError(self._engines[0].dead_because or STOPPING)
            engine = min(alive, key=lambda engine: len(engine.requests))
            number = engine.num_submitted % NUMBERS
            engine.num_submitted += 1
            engine.requests[request_id] = on_delta
            engine.names[number] = request_id
            self._owner[request_id] = engine, number
        self._command(
            engine,
            Submit(
                request_id,
                number,
                prompt,
                sampling,
                params.max_tokens,
                tuple(stop_ids),
                cache_salt,
            ),
        )

    def abort(self, request_id: str) -> None:
        """End a request, whose deltas nobody wants any more; unknown ids are ignored."""
        with self._lock:
            engine = self._forget(request_id)
        if engine is not None:
            self._command(engine, Abort(request_id))

    def _forget(self, request_id: str) -> _Engine | None:
        """Forget a request; return the engine that has it. The lock is held."""
        engine, number = self._owner.pop(request_id, (None, 0))
        if engine is not None:
            del engine.requests[request_id], engine.names[number]
        return engine

    def query(self, what: QueryKind, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Return one answer per living engine, in the order of the addresses.

        Raises:
            EngineDeadError: all engines are dead, or one did not answer in time.
        """
        self.check()
        futures: list[Future[dict[str, Any]]] = []
        for engine in self._engines:
            query = Query(next(self._query_ids), what)
            future: Future[dict[str, Any]] = Future()
            with self._lock:
                if engine.dead_because:
                    continue
                engine.queries[query.query_id] = future
            futures.append(future)
            self._command(engine, query)
        deadline = time.monotonic() + timeout_s
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except FutureTimeoutError:
            raise EngineDeadError(f"no answer to {what} within {timeout_s:g} s") from None

    def check(self) -> None:
        """Raise EngineDeadError, with the causes, if no engine is alive."""
        losses = self.losses()
        if len(losses) == len(self._engines) or not self._thread.is_alive():
            raise EngineDeadError("; ".join(losses) or STOPPING)

    def losses(self) -> list[str]:
        """Return why engines are dead, one reason for each; the others serve on."""
        with self._lock:
            return [e.dead_because for e in self._engines if e.dead_because]

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return len(self._owner)

    def close(self) -> None:
        """End all requests and the I/O thread. Idempotent; not for use inside ``on_delta``."""
        if not self._closing.is_set():
            self._closing.set()
            self._wakeup.wake()
            self._thread.join()
            self._wakeup.close()
            self._context.term()

    # -- I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = STOPPING
        try:
            self._serve()
        except Exception as e:  # Whatever it is: nobody may wait for a thread that has ended.
            logger.exception("the client's thread has ended")
            reason = f"{type(e).__name__}: {e}"
        self._closing.set()
        for engine in self._engines:
            self._lose(engine, reason)
            engine.link.close()

    def _serve(self) -> None:
        next_beat_s = 0.0
        poller = self._make_poller()
        while not self._closing.is_set():
            poller.poll(max(0, int((next_beat_s - time.monotonic()) * 1000) + 1))
            self._wakeup.drain()
            for engine in self._engines:
                self._receive(engine)
            self._send_commands()
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                if self._beat():
                    poller = self._make_poller()
        self._send_commands()
        for engine in self._engines:
            engine.link.send(Goodbye())

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for engine in self._engines:
            for socket in engine.link.sockets:
                poller.register(socket, zmq.POLLIN)
        return poller

    def _beat(self) -> bool:
        """Give signs of life, and replace links that were lost; say whether there were any."""
        is_new = False
        for engine in self._engines:
            if engine.link.is_lost:
                engine.link.close(0)
                engine.link = engine.open_link()
                is_new = True
            try:
                engine.link.beat()
            except EngineDeadError as e:
                self._lose(engine, str(e))
        return is_new

    def _receive(self, engine: _Engine) -> None:
        if engine.link.is_lost:
            return
        try:
            for message in engine.link.receive():
                if isinstance(message, Answer):
                    self._answered(engine, message)
                else:
                    self._deliver(engine, message)
        except EngineDeadError as e:
            self._lose(engine, str(e))
            return
        if engine.dead_because and engine.link.is_welcome:
            with self._lock:
                engine.dead_because = ""

    def _answered(self, engine: _Engine, message: Answer) -> None:
        with self._lock:
            future = engine.queries.pop(message.query_id, None)
        if future is not None:
            future.set_result(json.loads(message.body))

    def _deliver(self, engine: _Engine, message: Deltas) -> None:
        for delta in message.step.each(engine.names):
            with self._lock:
                on_delta = engine.requests.get(delta.request_id)
                if on_delta is not None and delta.finish_reason is not None:
                    self._forget(delta.request_id)
            if on_delta is not None:
                self._tell(on_delta, delta)

    def _tell(self, on_delta: OnDelta, delta: RequestDelta) -> None:
        """Call a request's callback. What it raises ends this request, and nothing else."""
        try:
            on_delta(delta)
        except Exception as e:
            logger.exception("the callback of request %r failed", delta.request_id)
            self.abort(delta.request_id)
            if delta.finish_reason is None:
                error = DistAclGraphError(f"the request's callback failed: {e!r}")
                self._tell(on_delta, failed(delta.request_id, error))

    def _lose(self, engine: _Engine, reason: str) -> None:
        """End everything that waits for this engine."""
        with self._lock:
            engine.dead_because = reason
            engine.link.is_lost = True
            requests = dict(engine.requests)
            queries, engine.queries = engine.queries, {}
            for request_id in requests:
                self._forget(request_id)
        for request_id, on_delta in requests.items():
            self._tell(on_delta, failed(request_id, EngineDeadError(reason)))
        for future in queries.values():
            future.set_exception(EngineDeadError(reason))

    def _command(self, engine: _Engine, message: ToEngine) -> None:
        self._commands.put((engine, message))
        self._wakeup.wake()

    def _send_commands(self) -> None:
        while not self._commands.empty():
            engine, message = self._commands.get()
            # What was lost with its link has ended already; a new connection knows nothing of it.
            if isinstance(message, Submit) and message.request_id not in engine.requests:
                continue
            if not engine.link.is_lost:
                engine.link.send(message)
