"""EngineClient connects an ingress or an LLM object to the engines of a deployment.

One I/O thread owns all sockets. If a link is lost, the engine drops all requests of that link; the
client gives these requests to another engine, which continues after the tokens that each request
already has (``token_log.py``). If there is no other engine, the requests wait for another engine
(``outage.py``). If no engine will be started, the requests end with an error. So no request hangs.
Requests of an engine that died take turns, because one of them may be the cause (``trials.py``).
The client opens another link to the lost engine, and uses that engine again after it has answered.

Each engine tells the client which engines exist (``GroupList``). The client sends requests to the
engines that accept new requests, by the rule of ``scheduler/routing.py``. If an engine drains, the
client closes its link to that engine as soon as no request of this client runs there.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import zmq

from dist_aclgraph.actors.client.known_engine import Capacity, KnownEngine, SeenGroupState
from dist_aclgraph.actors.client.outage import Outage, Recovery
from dist_aclgraph.actors.client.token_log import OnDelta, OpenRequest
from dist_aclgraph.actors.client.trials import Trials
from dist_aclgraph.actors.host.liveness import beat_s
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.engine_link import (
    LOSS_KINDS,
    EngineLink,
    LossKind,
)
from dist_aclgraph.actors.wire.messages import (
    Abort,
    Answer,
    Deltas,
    Goodbye,
    GroupList,
    Hello,
    Query,
    QueryKind,
    Submit,
    ToEngine,
    failed,
)
from dist_aclgraph.actors.wire.sockets import Wakeup
from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidParameterError,
    PlacementError,
)
from dist_aclgraph.ints import IntArray, pack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.scheduler.routing import RequestRouter, RoutedCounts
from dist_aclgraph.steps.delta import RequestDelta

# Assumed sizes of an engine's cache, until the engine has told the real sizes.
TOKENS_PER_BLOCK, CACHE_BLOCKS = 128, 4096
NUMBERS = 1 << 31  # request numbers of one engine; after the last number, 0 follows again
STOPPING = "the service is stopping"

logger = logging.getLogger(__name__)


class EngineClient:
    """Owns the connections to the engines. Handles token ids only, never text.

    Args:
        addresses: addresses of the engines, one per lockstep group. The client names the groups
            0, 1, ... until an engine tells their real names.
        node_id: Ray's id of the node of this process.
        token: the deployment's connection token.
        link_s: seconds; an engine that is silent for longer counts as dead. The value of
            ``timeouts.link_s``.
        recovery: how requests wait while no group accepts requests; None if requests do not wait.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        token: str,
        *,
        node_id: str,
        link_s: float,
        recovery: Recovery | None = None,
    ) -> None:
        if not addresses:
            raise EngineDeadError("the deployment has no engine")
        self._lock = threading.Lock()
        self._query_ids = itertools.count(1)
        self._commands: queue.SimpleQueue[tuple[KnownEngine, ToEngine]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hello = Hello(token, secrets.token_hex(8))
        self._node_id = node_id
        self._link_s = link_s
        self._groups_version = 0
        # If several groups are equally good, replicas of the ingress start with different groups.
        self._router = RequestRouter(first=secrets.randbelow(len(addresses)))
        self._engines: dict[str, KnownEngine] = {}  # the key is the engine's URL, as in the router
        for index, address in enumerate(addresses):
            self._add(str(index), address, CACHE_BLOCKS, TOKENS_PER_BLOCK)
        # Groups that run requests. Only the I/O thread changes this value, so a reader needs no
        # lock.
        self.num_groups = len(self._engines)
        self._beat_s = beat_s(link_s)
        # By request id: the engine, and the request's number there.
        self._owner: dict[str, tuple[KnownEngine, int]] = {}
        self.num_resumed = 0  # requests that another engine continued
        self._losses: Counter[LossKind] = Counter()
        self._outage = Outage(recovery)
        self._trials = Trials()
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
        output: bytes = b"",
    ) -> None:
        """Send a request to an engine that ``choose_group`` chooses.

        Args:
            params: ``max_tokens`` must be set; only the caller knows how long the context is.
            stop_ids: all token ids that end the output.
            on_delta: called on the I/O thread, in order, until a delta has a finish reason.
            seed: used if ``params`` has no seed.
            cache_salt: only requests with the same salt share cached blocks.
            output: tokens that the request already has, int32; the engine continues after them.

        Raises:
            EngineDeadError: no engine is alive, and no engine will be started.
            InvalidParameterError: the request id is in use, or ``max_tokens`` is not set.
        """
        if params.max_tokens is None:
            raise InvalidParameterError("max_tokens must be set before submission", "max_tokens")
        sampling = row_sampling(
            params, seed=seed, num_prompt_tokens=len(prompt_ids), end_ids=stop_ids
        )
        request = OpenRequest(
            request_id,
            bytearray(pack_ints(prompt_ids)),
            sampling,
            params.max_tokens,
            tuple(stop_ids),
            cache_salt,
            on_delta,
        )
        request.append(output)
        with self._lock:
            places = (self._owner, self._outage, self._trials)
            if any(request_id in place for place in places):
                raise InvalidParameterError(f"request id {request_id!r} is in use", "request_id")
            if not self._place(request):
                raise EngineDeadError(self._why_dead())
        self._wakeup.wake()

    def _place(self, request: OpenRequest) -> bool:
        """Send a request to an engine, or let it wait. Return False if neither is possible.

        The caller holds the lock.
        """
        if self._closing.is_set():
            return False
        now_s = time.monotonic()
        if request.is_suspect and self._taking():
            self._trials.wait(request, self._outage.deadline_s(now_s))
            return True
        return self._give(request) or self._outage.hold(request, now_s)

    def _taking(self) -> list[str]:
        """Return the URLs of the engines that accept requests. The caller holds the lock.

        An engine that has not answered yet is used only if no engine has answered.
        """
        serving = [engine for engine in self._engines.values() if engine.state == "serving"]
        return [e.url for e in serving if e.link.is_welcome] or [e.url for e in serving]

    def _give(self, request: OpenRequest, among: Sequence[str] = ()) -> bool:
        """Send a request to an engine; return whether an engine accepts requests.

        The caller holds the lock.

        Args:
            among: URLs of engines; by default, of all engines that accept requests.
        """
        taking = among or self._taking()
        if not taking:
            return False
        request_id, tokens = request.request_id, bytes(request.tokens)
        engine = self._engines[self._router.route(request_id, tokens, request.cache_salt, taking)]
        number = engine.num_submitted % NUMBERS
        engine.num_submitted += 1
        engine.requests[request_id] = request
        engine.names[number] = request_id
        self._owner[request_id] = engine, number
        self.num_resumed += request.is_resumed
        # The lock is held, so that a request that was routed by one version of the group list is
        # sent before the client confirms the next version.
        self._commands.put((engine, request.submit(number)))
        return True

    def abort(self, request_id: str) -> None:
        """End a request whose deltas are not needed any more; unknown ids are ignored."""
        with self._lock:
            engine = self._forget(request_id)
        if engine is not None:
            self._command(engine, Abort(request_id))

    def _forget(self, request_id: str) -> KnownEngine | None:
        """Remove a request; return the engine that had it. The caller holds the lock."""
        self._outage.forget(request_id)
        self._trials.leave(request_id)
        engine, number = self._owner.pop(request_id, (None, 0))
        if engine is not None:
            del engine.requests[request_id], engine.names[number]
            self._router.ended(request_id)
        return engine

    def query(self, what: QueryKind, timeout_s: float = 5.0) -> dict[str, dict[str, Any]]:
        """Return the response of each living engine; the keys are the names of the groups.

        Engines that have drained, have died, or do not answer in time are left out.

        Raises:
            EngineDeadError: no engine has answered.
        """
        self.raise_if_dead()
        asked: list[tuple[KnownEngine, int, Future[dict[str, Any]]]] = []
        for engine in self._known():
            query = Query(next(self._query_ids), what)
            future: Future[dict[str, Any]] = Future()
            with self._lock:
                if engine.dead_because or engine.url not in self._engines:
                    continue
                engine.queries[query.query_id] = future
            asked.append((engine, query.query_id, future))
            self._command(engine, query)
        deadline = time.monotonic() + timeout_s
        answers: dict[str, dict[str, Any]] = {}
        problem = self.outage() or STOPPING
        for engine, query_id, future in asked:
            try:
                answers[engine.name] = future.result(max(0.0, deadline - time.monotonic()))
            except CancelledError:  # the engine was removed
                continue
            except EngineDeadError as e:
                problem = str(e)
            except FutureTimeoutError:
                problem = f"no answer to {what} within {timeout_s:g} s"
                with self._lock:
                    engine.queries.pop(query_id, None)
        if not answers:
            raise EngineDeadError(problem)
        return answers

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError with the causes if no engine is alive and none will be started."""
        with self._lock:
            capacity = Capacity.of(self._engines.values())
            is_alive = capacity.serving + capacity.draining or self._outage.may_end
            if not is_alive or not self._thread.is_alive():
                raise EngineDeadError(self._why_dead())

    def outage(self) -> str:
        """Return why no group accepts or runs requests, and the progress of another group's start.

        Returns "" while a group both accepts and runs requests.
        """
        with self._lock:
            if taking := self._taking():
                pauses = [self._engines[url].link.pause for url in taking]
                return "" if "" in pauses else pauses[0]
            progress = self._outage.outlook.progress or "no other one has been started yet"
            return f"no group takes requests: {self._why_dead()}; recovering: {progress}"

    def outage_seconds(self) -> float:
        """Return the total time during which no group accepted requests."""
        with self._lock:
            return self._outage.seconds(time.monotonic())

    @property
    def num_held(self) -> int:
        """Requests that wait for a group, or for their turn there."""
        with self._lock:
            return self._num_held

    def losses(self) -> list[str]:
        """Return one reason for each dead engine; the other engines continue to serve."""
        return list(self.capacity().lost.values())

    def num_losses(self) -> dict[LossKind, int]:
        """Return how many times an engine was lost, by kind of loss."""
        with self._lock:
            return {kind: self._losses[kind] for kind in LOSS_KINDS}

    def capacity(self) -> Capacity:
        """Return the number of groups in each state."""
        with self._lock:
            return Capacity.of(self._engines.values())

    def states(self) -> dict[str, SeenGroupState]:
        """Return the state of each group, by the group's name."""
        with self._lock:
            return {engine.name: engine.state for engine in self._engines.values()}

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call of ``close``; return whether it was called."""
        return self._closing.wait(timeout_s)

    def routed(self) -> dict[str, RoutedCounts]:
        """Return the counts of routed requests, by the group's name."""
        with self._lock:
            counts = self._router.counts
            return {e.name: replace(counts[e.url]) for e in self._engines.values()}

    def _why_dead(self) -> str:
        losses = [e.dead_because for e in self._engines.values() if e.dead_because]
        return self._outage.outlook.failure or "; ".join(losses) or STOPPING

    def _known(self) -> list[KnownEngine]:
        with self._lock:
            return list(self._engines.values())

    def _add(self, name: str, address: Address, cache_blocks: int, tokens_per_block: int) -> None:
        """Add an engine, or update its sizes. Once the thread runs, the caller holds the lock."""
        url = address.file.url
        if url not in self._engines:
            endpoint = address.seen_from(self._node_id)
            link = partial(EngineLink, self._context, endpoint, self._hello, self._link_s)
            self._engines[url] = KnownEngine(name, url, link, time.monotonic())
        self._engines[url].name = name
        self._router.add(url, cache_blocks, tokens_per_block)

    @property
    def _num_held(self) -> int:
        return len(self._outage) + len(self._trials)

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return len(self._owner) + self._num_held

    def close(self) -> None:
        """End all requests and the I/O thread. Idempotent; not for use inside ``on_delta``."""
        if not self._closing.is_set():
            self._closing.set()
            self._wakeup.wake()
            self._thread.join()
            if self._outage.outlook_poller is not None:
                self._outage.outlook_poller.close()
            self._wakeup.close()
            self._context.term()

    # -- I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = STOPPING
        try:
            self._serve()
        except Exception as e:  # any exception: no request may wait for a thread that has ended
            logger.exception("the client's thread has ended")
            reason = f"{type(e).__name__}: {e}"
        self._closing.set()
        for engine in self._known():
            self._lose(engine, reason)
        with self._lock:
            waiting = self._outage.take_all() + self._trials.take_waiting()
        for request in waiting:
            self._end(request, EngineDeadError(reason))
        for engine in self._known():
            engine.link.close()

    def _serve(self) -> None:
        next_beat_s = 0.0
        poller = self._make_poller()
        while not self._closing.is_set():
            found = poller.poll(max(0, int((next_beat_s - time.monotonic()) * 1000) + 1))
            if self._wakeup.fileno() in dict(found):
                self._wakeup.drain()
            version = self._groups_version
            for engine in self._known():
                self._receive(engine)
            self._look_at_outage()
            self._send_commands()
            is_new = self._groups_version != version
            if is_new or time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._beat_s
                if self._beat() or is_new:
                    poller = self._make_poller()
        self._send_commands()
        for engine in self._known():
            engine.link.send(Goodbye())

    def _look_at_outage(self) -> None:
        """Adopt the controller's last outlook, and end requests that have waited too long."""
        outlook = None
        if self._outage.outlook_poller is not None:
            outlook = self._outage.outlook_poller.take_answer()
        if outlook is not None:
            if outlook.groups.groups:
                self._follow(outlook.token, outlook.node_id)
            self._adopt(outlook.groups)
        now_s = time.monotonic()
        over: list[tuple[OpenRequest, DistAclGraphError]] = []
        with self._lock:
            self.num_groups = sum(not engine.dead_because for engine in self._engines.values())
            is_served = bool(self._taking())
            self._outage.see(now_s, is_served=is_served)
            if is_served:
                for request in self._outage.take_all():
                    self._trials.wait(request, self._outage.deadline_s(now_s))
                self._begin_turn()
            else:
                if outlook is not None:
                    self._outage.outlook = outlook
                for request in self._trials.take_waiting():
                    if not self._outage.hold(request, now_s):
                        over.append((request, EngineDeadError(self._why_dead())))
                if not self._outage.may_end:
                    dead = EngineDeadError(self._why_dead())
                    over += [(request, dead) for request in self._outage.take_all()]
            overdue = self._outage.take_overdue(now_s) + self._trials.take_waiting(now_s)
            if overdue:
                late = EngineUnavailableError(self._outage.overdue_reason())
                over += [(request, late) for request in overdue]
        for request, error in over:
            self._end(request, error)

    def _begin_turn(self) -> None:
        """Let the next requests run that lost their engine. The caller holds the lock."""
        if self._trials.is_turn:
            return
        taking = [self._engines[url] for url in self._taking()]
        unproven = [engine.url for engine in taking if not engine.is_proven]
        if unproven and self._trials.has_suspects:
            probes = {f"probe-{secrets.token_hex(8)}": url for url in unproven}
            self._trials.begin_probes(probes)
            for request_id, url in probes.items():
                self._give(OpenRequest.probe(request_id), [url])
            return

        def suitable(request: OpenRequest) -> list[str]:
            fit = request.num_deaths < 2
            return [e.url for e in taking if fit or self._is_newer(e, request)]

        for request in self._trials.begin_turn(lambda request: bool(suitable(request))):
            self._give(request, suitable(request))

    def _is_newer(self, engine: KnownEngine, request: OpenRequest) -> bool:
        """Whether an engine has started since a request lost its first engine.

        If lost engines are not replaced, each engine counts as such an engine.
        """
        return not self._outage.has_recovery or engine.added_s > request.first_death_s

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for engine in self._known():
            for socket in engine.link.sockets:
                poller.register(socket, zmq.POLLIN)
        return poller

    def _beat(self) -> bool:
        """Send heartbeats, reopen lost links, and remove engines that have drained.

        Returns:
            Whether a link was reopened, or an engine was removed.
        """
        is_new = False
        for engine in self._known():
            if self._leave(engine):
                is_new = True
                continue
            if engine.link.is_lost:
                engine.link.close(0)
                engine.link, engine.is_proven = engine.open_link(), False
                is_new = True
            with self._lock:
                load = self._router.load(engine.url)
            try:
                engine.link.beat(load, self._groups_version)
            except EngineDeadError as e:
                self._lose(engine, str(e))
        return is_new

    def _leave(self, engine: KnownEngine) -> bool:
        """Remove an engine if it has drained; return whether it was removed."""
        with self._lock:
            is_over = engine.link.is_lost or not (engine.is_listed or engine.requests)
            if not (engine.is_draining and is_over):
                return False
            del self._engines[engine.url]
            self._router.remove(engine.url)
            queries, engine.queries = engine.queries, {}
        if not engine.link.is_lost:
            engine.link.send(Goodbye())
        engine.link.close()
        engine.link.is_lost = True  # for commands that are still in the queue for this engine
        for future in queries.values():
            future.cancel()
        return True

    def _follow(self, token: str, node_id: str) -> None:
        """If the token is new, switch to its deployment, whose group lists have new versions."""
        if token and token != self._hello.token:
            logger.warning("the deployment is another one now")
            with self._lock:
                self._hello = msgspec.structs.replace(self._hello, token=token)
                self._groups_version = -1
                self._node_id = node_id or self._node_id

    def _adopt(self, groups: GroupList) -> None:
        """Adopt a newer list of groups. An empty list means that the deployment has ended."""
        if groups.version <= self._groups_version or not groups.groups:
            return
        with self._lock:
            self._groups_version = groups.version
            listed = {entry.address.file.url: entry for entry in groups.groups}
            for url, engine in self._engines.items():
                engine.is_listed = url in listed
                engine.is_draining = not engine.is_listed or listed[url].is_draining
            for url, entry in listed.items():
                if url not in self._engines and entry.is_draining:
                    continue
                try:
                    self._add(entry.name, entry.address, entry.cache_blocks, entry.tokens_per_block)
                except PlacementError as e:  # other clients may reach the group
                    logger.warning("group %s cannot be used from here: %s", entry.name, e)

    def _receive(self, engine: KnownEngine) -> None:
        if engine.link.is_lost:
            return
        try:
            for message in engine.link.receive():
                if isinstance(message, Answer):
                    self._answered(engine, message)
                elif isinstance(message, GroupList):
                    self._adopt(message)
                else:
                    self._deliver(engine, message)
        except EngineDeadError as e:
            self._lose(engine, str(e))
            return
        with self._lock:
            self._router.hear(engine.url, engine.link.others_tokens)
            if engine.dead_because and engine.link.is_welcome:
                engine.dead_because = ""

    def _answered(self, engine: KnownEngine, message: Answer) -> None:
        with self._lock:
            future = engine.queries.pop(message.query_id, None)
        if future is not None:
            future.set_result(json.loads(message.body))

    def _deliver(self, engine: KnownEngine, message: Deltas) -> None:
        """Hand out the deltas of a step.

        Raises:
            EngineDeadError: the engine has ended. All other requests of this engine are still open.
        """
        told: list[tuple[OnDelta, RequestDelta]] = []
        death = ""
        with self._lock:  # lock once for all requests
            engine.is_proven = True
            for delta in message.step.each(engine.names):
                if delta.error_kind == EngineDeadError.__name__:
                    death = delta.error
                    break
                request = engine.requests[delta.request_id]
                request.note(delta)
                if self._trials.is_turn and not request.is_suspect:
                    self._trials.leave(delta.request_id)
                self._router.begun(delta.request_id)
                told.append((request.on_delta, delta))
                if delta.finish_reason is not None:
                    self._forget(delta.request_id)
        for on_delta, delta in told:
            self._tell(on_delta, delta)
        if death:
            raise EngineDeadError(death)

    def _resume(self, request: OpenRequest, kind: LossKind, *, is_proof: bool) -> bool:
        """Continue a request of a lost link; return whether that is possible.

        The caller holds the lock.
        """
        if request.is_probe:
            return False
        request.is_resumed = True
        if kind != "refused":  # an engine that refuses its client is not dead
            request.see_death(time.monotonic(), is_proof=is_proof)
        return not request.is_cause and self._place(request)

    def _end(self, request: OpenRequest, error: DistAclGraphError) -> None:
        """End a request that will not be continued."""
        if request.is_cause:
            reason = (
                f"{request.num_deaths} engines died while they ran this request, all of them at "
                f"output token {request.num_output_tokens}; the last: {error}"
            )
            logger.error("request %r is not tried again: %s", request.request_id, reason)
            error = EngineDeadError(reason)
        self._tell(request.on_delta, failed(request.request_id, error))

    def _tell(self, on_delta: OnDelta, delta: RequestDelta) -> None:
        """Call a request's callback. An exception of the callback ends this request only."""
        try:
            on_delta(delta)
        except Exception as e:
            logger.exception("the callback of request %r failed", delta.request_id)
            self.abort(delta.request_id)
            if delta.finish_reason is None:
                error = DistAclGraphError(f"the request's callback failed: {e!r}")
                self._tell(on_delta, failed(delta.request_id, error))

    def _lose(self, engine: KnownEngine, reason: str) -> None:
        """Let other engines continue this engine's requests; end the queries to this engine."""
        with self._lock:
            # The process of a group that has drained ends in order, for example after a roll.
            if not (engine.dead_because or engine.has_drained or self._closing.is_set()):
                self._losses[engine.link.loss_kind] += 1
            engine.dead_because = reason
            engine.link.is_lost = True
            requests = list(engine.requests.values())
            queries, engine.queries = engine.queries, {}
            alone = self._trials.alone if engine.is_proven else None
            for request in requests:
                self._forget(request.request_id)
            self._router.forget_cache(engine.url)
            # Keep the lock, so that an abort finds each request either at this engine or at its new
            # engine.
            over = []
            for request in requests:
                is_proof = request.request_id == alone and self._is_newer(engine, request)
                if not self._resume(request, engine.link.loss_kind, is_proof=is_proof):
                    over.append(request)
            self._outage.see(time.monotonic(), is_served=bool(self._taking()))
            num_held = self._num_held
        if len(over) < len(requests):
            logger.info(
                "%d requests go on elsewhere, %d wait for a group: %s",
                len(requests) - len(over) - num_held,
                num_held,
                reason,
            )
        for request in over:
            self._end(request, EngineDeadError(reason))
        for future in queries.values():
            future.set_exception(EngineDeadError(reason))

    def _command(self, engine: KnownEngine, message: ToEngine) -> None:
        self._commands.put((engine, message))
        self._wakeup.wake()

    def _send_commands(self) -> None:
        while not self._commands.empty():
            engine, message = self._commands.get()
            # Another engine continues a request of a lost link. The new connection has no data of
            # the request.
            if isinstance(message, Submit) and message.number not in engine.names:
                continue
            if not engine.link.is_lost:
                engine.link.send(message)
