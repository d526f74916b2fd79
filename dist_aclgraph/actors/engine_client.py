"""EngineClient: how an ingress, or an LLM object, talks to the engines of a deployment.

One I/O thread owns all sockets. A request lives on one engine from submit to its last delta; an
engine that stays silent for too long ends all its requests with an error, so that nobody hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from dist_aclgraph.actors.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Answer,
    Deltas,
    Hello,
    Query,
    QueryKind,
    Refused,
    Submit,
    ToEngine,
    encoder,
    from_engine_decoder,
)
from dist_aclgraph.config import Config
from dist_aclgraph.errors import EngineDeadError, InvalidParameterError, QueueFullError
from dist_aclgraph.ints import IntArray, pack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.steps.delta import RequestDelta

OnDelta = Callable[[RequestDelta], None]

STOPPING = "the service is stopping"


class Deployment(Protocol):
    """What an ingress or an LLM needs of a running deployment."""

    addresses: list[str]
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


@dataclass
class _Link:
    """One engine. The client's lock guards ``requests``, ``queries`` and ``dead_because``."""

    address: str
    socket: zmq.Socket[bytes]
    last_heard_s: float
    hellos: int = 0
    dead_because: str = ""
    requests: dict[str, OnDelta] = field(default_factory=dict)
    queries: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)


class EngineClient:
    """Owns the connections to the engines. Knows token ids only, no text.

    Args:
        addresses: one ZeroMQ address per lockstep group.
        token: the deployment's connection token.
        heartbeat_s: how often each engine is asked for its health.
        dead_after_s: silence after which an engine counts as dead.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        *,
        heartbeat_s: float = 0.5,
        dead_after_s: float = 10.0,
    ) -> None:
        if not addresses:
            raise EngineDeadError("the deployment has no engine")
        self._token = token
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._lock = threading.Lock()
        self._query_ids = itertools.count(1)
        self._commands: queue.SimpleQueue[tuple[_Link, ToEngine]] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._context = zmq.Context()
        self._links = [self._connect(address) for address in addresses]
        self._owner: dict[str, _Link] = {}
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
        message = Submit(
            request_id,
            pack_ints(prompt_ids),
            sampling,
            params.max_tokens,
            tuple(stop_ids),
            cache_salt,
        )
        with self._lock:
            if request_id in self._owner:
                raise InvalidParameterError(f"request id {request_id!r} is in use", "request_id")
            alive = [link for link in self._links if not link.dead_because]
            if not alive or self._closing.is_set():
                raise EngineDeadError(self._links[0].dead_because or STOPPING)
            link = min(alive, key=lambda link: len(link.requests))
            link.requests[request_id] = on_delta
            self._owner[request_id] = link
        self._command(link, message)

    def abort(self, request_id: str) -> None:
        """End a request, whose deltas nobody wants any more; unknown ids are ignored."""
        with self._lock:
            link = self._owner.pop(request_id, None)
            if link is not None:
                link.requests.pop(request_id, None)
        if link is not None:
            self._command(link, Abort(request_id))

    def query(self, what: QueryKind, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Return one answer per engine, in the order of the addresses.

        Raises:
            EngineDeadError: an engine is dead or did not answer in time.
        """
        futures: list[Future[dict[str, Any]]] = []
        for link in self._links:
            query = Query(next(self._query_ids), what)
            future: Future[dict[str, Any]] = Future()
            with self._lock:
                if link.dead_because:
                    raise EngineDeadError(link.dead_because)
                link.queries[query.query_id] = future
            futures.append(future)
            self._command(link, query)
        deadline = time.monotonic() + timeout_s
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except FutureTimeoutError:
            raise EngineDeadError(f"no answer to {what} within {timeout_s:g} s") from None

    def check(self) -> None:
        """Raise EngineDeadError, with the cause, if any engine is dead."""
        with self._lock:
            reasons = [link.dead_because for link in self._links if link.dead_because]
        if reasons or not self._thread.is_alive():
            raise EngineDeadError("; ".join(reasons) or STOPPING)

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return len(self._owner)

    def close(self) -> None:
        """End all requests and the I/O thread. Idempotent; not for use inside ``on_delta``."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake()
            self._thread.join()
            self._wake_out.close()
            self._wake_in.close()
            self._context.destroy(linger=0)

    # -- I/O thread ---------------------------------------------------------------------------

    def _connect(self, address: str) -> _Link:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 100)  # lets a last Abort out
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.connect(address)
        return _Link(address, dealer, time.monotonic())

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        by_socket = {link.socket: link for link in self._links}
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
            self._send(link, Hello(self._token))
        next_beat_s = 0.0
        while not self._closing.is_set():
            for ready, _ in poller.poll(max(0, int((next_beat_s - time.monotonic()) * 1000) + 1)):
                if ready in by_socket:
                    self._receive(by_socket[ready])
                else:
                    self._drain_wake()
            self._send_commands()
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._heartbeat_s
                for link in self._links:
                    self._beat(link)
        self._send_commands()
        for link in self._links:
            self._lose(link, STOPPING)
            link.socket.close()

    def _beat(self, link: _Link) -> None:
        silent_s = time.monotonic() - link.last_heard_s
        if silent_s > self._dead_after_s and not link.dead_because:
            self._lose(link, f"the engine has been silent for {silent_s:.1f} s")
        if link.dead_because:  # another engine may answer there: introduce ourselves again
            link.hellos += 1
            self._send(link, Hello(self._token, link.hellos))
        self._send(link, Query(0, "health"))

    def _receive(self, link: _Link) -> None:
        while link.socket.poll(0):
            frame = link.socket.recv()
            try:
                message = from_engine_decoder.decode(frame)
            except msgspec.DecodeError as e:
                self._lose(link, f"the engine sent what is no message: {e}")
                continue
            if isinstance(message, Refused):
                self._lose(link, f"the engine refused the connection: {message.reason}")
                continue
            link.last_heard_s = time.monotonic()
            if isinstance(message, Answer):
                self._answered(link, message)
            elif isinstance(message, Deltas):
                for delta in message.deltas:
                    self._deliver(link, delta)

    def _answered(self, link: _Link, message: Answer) -> None:
        if message.query_id == 0:
            health = json.loads(message.body)
            dead_because = "" if health.get("ok", True) else str(health.get("error", "unhealthy"))
            if dead_because and not link.dead_because:
                self._lose(link, dead_because)
            with self._lock:
                link.dead_because = dead_because
            return
        with self._lock:
            future = link.queries.pop(message.query_id, None)
        if future is not None:
            future.set_result(json.loads(message.body))

    def _deliver(self, link: _Link, delta: RequestDelta) -> None:
        with self._lock:
            on_delta = link.requests.get(delta.request_id)
            if on_delta is not None and delta.finish_reason is not None:
                del link.requests[delta.request_id]
                del self._owner[delta.request_id]
        if on_delta is not None:
            on_delta(delta)

    def _lose(self, link: _Link, reason: str) -> None:
        """End everything that waits for this engine."""
        with self._lock:
            link.dead_because = reason
            requests, link.requests = link.requests, {}
            queries, link.queries = link.queries, {}
            for request_id in requests:
                self._owner.pop(request_id, None)
        for request_id, on_delta in requests.items():
            on_delta(
                RequestDelta(
                    request_id, finish_reason="error", error=reason, error_kind="EngineDeadError"
                )
            )
        for future in queries.values():
            future.set_exception(EngineDeadError(reason))

    def _command(self, link: _Link, message: ToEngine) -> None:
        self._commands.put((link, message))
        self._wake()

    def _send_commands(self) -> None:
        while not self._commands.empty():
            self._send(*self._commands.get())

    def _send(self, link: _Link, message: ToEngine) -> None:
        try:
            link.socket.send(encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            if isinstance(message, Submit):
                error = "the engine's queue of messages is full"
                self._deliver(
                    link,
                    RequestDelta(
                        message.request_id, finish_reason="error", error=error,
                        error_kind=QueueFullError.__name__,
                    ),
                )  # fmt: skip

    def _wake(self) -> None:
        # A full pipe means that the thread has wake-ups waiting already, a closed one that it left.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass
