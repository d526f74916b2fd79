"""RequestTable: decides which engine runs each open request of a client.

If an engine dies, the table sends the engine's requests to other engines. A request continues after
the tokens that it already has (``token_log.py``). Requests of a dead engine do not all run at once,
because one of these requests might be the cause of the death (``trials.py``). If no engine accepts
requests, requests wait (``outage.py``).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from dist_aclgraph.actors.client.known_engine import KnownEngine
from dist_aclgraph.actors.client.outage import Outage, Outlook, Recovery
from dist_aclgraph.actors.client.token_log import OnDelta, OpenRequest
from dist_aclgraph.actors.client.trials import Trials
from dist_aclgraph.actors.wire.engine_link import EngineLink, LossKind
from dist_aclgraph.actors.wire.messages import Deltas, Submit
from dist_aclgraph.errors import DistAclGraphError, EngineDeadError, EngineUnavailableError
from dist_aclgraph.scheduler.routing import RequestRouter, RoutedCounts
from dist_aclgraph.steps.delta import RequestDelta

# The client numbers its requests on an engine from 0 to NUMBERS - 1, then begins at 0 again.
NUMBERS = 1 << 31
STOPPING = "the service is stopping"

logger = logging.getLogger(__name__)

# a request that must end, and the error for its client
Over = tuple[OpenRequest, DistAclGraphError]


class RequestTable:
    """Owns the engines that a client knows, and all open requests.

    The client's lock guards this object. No method waits or calls a request's callback.

    Args:
        router: chooses an engine for a request. The router identifies engines by their URLs.
        recovery: how requests wait while no group accepts requests. If None, requests do not wait,
            but fail.
        send: queues a request for an engine.

    Attributes:
        engines: maps the URL of each engine to the engine.
        num_resumed: how many requests were resumed on another engine.
        losses: number of lost engines for each kind of loss.
    """

    def __init__(
        self,
        router: RequestRouter,
        recovery: Recovery | None,
        send: Callable[[KnownEngine, Submit], None],
    ) -> None:
        self.engines: dict[str, KnownEngine] = {}
        self.num_resumed = 0
        self.losses: Counter[LossKind] = Counter()
        self.outage = Outage(recovery)
        self.router = router
        self._send = send
        # The keys are request ids. The values are the engine, and the request's number on this
        # engine.
        self._owner: dict[str, tuple[KnownEngine, int]] = {}
        self._trials = Trials()
        # A prefill group has computed the prompts of these requests. Other engines must continue
        # the requests.
        self._handed_over: list[OpenRequest] = []

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in place for place in (self._owner, self.outage, self._trials))

    def __len__(self) -> int:
        return len(self._owner) + self.num_held

    @property
    def num_held(self) -> int:
        """The number of requests that wait for a group, or wait to run again after the death of an
        engine (see ``trials.py``).
        """
        return len(self.outage) + len(self._trials)

    # ---- engines

    def add(
        self,
        name: str,
        url: str,
        open_link: Callable[[], EngineLink],
        now_s: float,
        *,
        cache_blocks: int,
        tokens_per_block: int,
    ) -> None:
        """Add an engine, or update its name and the sizes of its cache."""
        if url not in self.engines:
            self.engines[url] = KnownEngine(name, url, open_link, now_s)
        self.engines[url].name = name
        self.router.add(url, cache_blocks, tokens_per_block)

    def remove(self, engine: KnownEngine) -> None:
        """Remove an engine that runs no request of this client."""
        del self.engines[engine.url]
        self.router.remove(engine.url)

    def taking(self) -> list[str]:
        """Return the URLs of the engines to which requests can be sent.

        The result contains the engines that have answered the client. If there is no such engine,
        the result contains the engines that have not answered yet.
        """
        serving = [engine for engine in self.engines.values() if engine.state == "serving"]
        return [e.url for e in serving if e.link.is_welcome] or [e.url for e in serving]

    def why_dead(self) -> str:
        losses = [e.dead_because for e in self.engines.values() if e.dead_because]
        return self.outage.outlook.failure or "; ".join(losses) or STOPPING

    def routed(self) -> dict[str, RoutedCounts]:
        """Return how many requests were routed to each group; the keys are the groups' names."""
        counts = self.router.counts
        return {engine.name: replace(counts[engine.url]) for engine in self.engines.values()}

    # ---- requests

    def place(self, request: OpenRequest, now_s: float) -> bool:
        """Send a request to an engine. If no engine accepts requests, let the request wait. Return
        False if the request cannot wait.
        """
        if request.is_suspect and self.taking():
            self._trials.wait(request, self.outage.deadline_s(now_s))
            return True
        return self._give(request) or self.outage.hold(request, now_s)

    def forget(self, request_id: str) -> KnownEngine | None:
        """Remove a request. Return the engine that ran the request; None if no engine ran it."""
        self.outage.forget(request_id)
        self._trials.leave(request_id)
        engine, number = self._owner.pop(request_id, (None, 0))
        if engine is not None:
            del engine.requests[request_id], engine.names[number]
            self.router.ended(request_id)
        return engine

    def take_deltas(
        self, engine: KnownEngine, message: Deltas
    ) -> tuple[list[tuple[OnDelta, RequestDelta]], str]:
        """Store the deltas of a step, and remove the requests that have ended.

        Returns:
            The deltas with their callbacks, and a text that says why the engine has ended. The text
            is "" if the engine has not ended. The unfinished requests of an ended engine are still
            open.
        """
        told: list[tuple[OnDelta, RequestDelta]] = []
        engine.is_proven = True
        for delta in message.step.each(engine.names):
            if delta.error_kind == EngineDeadError.__name__:
                return told, delta.error
            request = engine.requests[delta.request_id]
            request.note(delta)
            if request.hands_over and delta.finish_reason == "length":
                self.forget(delta.request_id)
                request.source = engine.name
                self._handed_over.append(request)
                # the delta that ends a request may have no tokens
                if delta.token_ids:
                    told.append((request.on_delta, replace_fields(delta, finish_reason=None)))
                continue
            if self._trials.is_turn and not request.is_suspect:
                self._trials.leave(delta.request_id)
            self.router.begun(delta.request_id)
            if request.role == "prefill" and delta.finish_reason == "length":
                delta = replace_fields(delta, group=engine.name)
            told.append((request.on_delta, delta))
            if delta.finish_reason is not None:
                self.forget(delta.request_id)
        return told, ""

    def continue_elsewhere(self, now_s: float) -> list[OpenRequest]:
        """Let other engines continue the requests whose prompts a prefill group has computed.
        Return the requests that must end because no engine can run them.
        """
        requests, self._handed_over = self._handed_over, []
        return [request for request in requests if not self.place(request, now_s)]

    def lose(
        self, engine: KnownEngine, reason: str, now_s: float, *, is_over: bool
    ) -> list[OpenRequest]:
        """Let other engines continue the requests of a lost engine.

        Args:
            is_over: whether the client is being closed. If True, no request continues.

        Returns:
            The requests that end.
        """
        # The engine of a drained group exits on purpose, so its exit is not counted as a loss.
        if not (engine.dead_because or engine.has_drained or is_over):
            self.losses[engine.link.loss_kind] += 1
        engine.dead_because = reason
        engine.link.is_lost = True
        requests = list(engine.requests.values())
        # If a request has made no progress on this engine, the request may be the cause of the
        # engine's death.
        untried = [request.request_id for request in requests if not request.has_run]
        alone = self._trials.alone if engine.is_proven else None
        if untried != [alone]:
            alone = None
        for request in requests:
            self.forget(request.request_id)
        self.router.forget_cache(engine.url)
        ended, num_held = [], self.num_held
        for request in requests:
            is_proof = request.request_id == alone and self._is_newer(engine, request)
            if is_over or not self._resume(request, engine, now_s, is_proof=is_proof):
                ended.append(request)
        self.outage.see(now_s, is_served=bool(self.taking()))
        if len(ended) < len(requests):
            num_waiting = self.num_held - num_held
            num_moved = len(requests) - len(ended) - num_waiting
            logger.info("%d requests go on elsewhere, %d wait: %s", num_moved, num_waiting, reason)
        return ended

    def look(self, now_s: float, outlook: Outlook | None) -> list[Over]:
        """Let waiting requests run if an engine accepts requests; return the requests that end.

        Args:
            outlook: the controller's new outlook; None if the controller has sent no outlook since
                the last call.
        """
        over: list[Over] = []
        is_served = bool(self.taking())
        self.outage.see(now_s, is_served=is_served)
        if is_served:
            for request in self.outage.take_all():
                self._trials.wait(request, self.outage.deadline_s(now_s))
            self._begin_turn()
        else:
            if outlook is not None:
                self.outage.outlook = outlook
            dead = EngineDeadError(self.why_dead())
            for request in self._trials.take_waiting():
                if not self.outage.hold(request, now_s):
                    over.append((request, dead))
            if not self.outage.may_end:
                over += [(request, dead) for request in self.outage.take_all()]
        overdue = self.outage.take_overdue(now_s) + self._trials.take_waiting(now_s)
        if overdue:
            late = EngineUnavailableError(self.outage.overdue_reason())
            over += [(request, late) for request in overdue]
        return over

    def take_waiting(self) -> list[OpenRequest]:
        return self.outage.take_all() + self._trials.take_waiting()

    def _give(self, request: OpenRequest, among: Sequence[str] = ()) -> bool:
        """Send a request to an engine. Return False if no engine accepts requests.

        Args:
            among: URLs of the engines to choose from; by default, all engines that accept requests.
        """
        taking = among or self.taking()
        if not taking:
            return False
        request_id, tokens = request.request_id, bytes(request.tokens)
        request.hands_over, able = self.router.for_role(
            tokens,
            request.cache_salt,
            {url: self.engines[url].prefill_from for url in taking},
            may_hand_over=request.may_hand_over,
        )
        engine = self.engines[self.router.route(request_id, tokens, request.cache_salt, able)]
        number = engine.num_submitted % NUMBERS
        engine.num_submitted += 1
        engine.requests[request_id] = request
        request.num_deltas = 0
        engine.names[number] = request_id
        self._owner[request_id] = engine, number
        self.num_resumed += request.is_resumed
        # The request is sent under the lock. So the client sends all requests that it has routed by
        # one version of the group list before it confirms the next version to the engines.
        self._send(engine, request.submit(number))
        return True

    def _resume(
        self, request: OpenRequest, engine: KnownEngine, now_s: float, *, is_proof: bool
    ) -> bool:
        """Continue a request of a lost engine on another engine, or let the request wait. Return
        False if the request must end.
        """
        if request.is_probe:
            return False
        request.is_resumed = True
        # An engine that refuses this client has not died, so ``num_deaths`` does not change.
        if engine.link.loss_kind != "refused":
            request.see_death(now_s, is_proof=is_proof)
        return not request.is_cause and self.place(request, now_s)

    def _begin_turn(self) -> None:
        """Let the next requests of dead engines run again, if the previous ones have made progress
        or have ended (see ``trials.py``).
        """
        if self._trials.is_turn:
            return
        taking = [self.engines[url] for url in self.taking()]
        unproven = [engine.url for engine in taking if not engine.is_proven]
        if unproven and self._trials.has_suspects:
            probes = {f"probe-{secrets.token_hex(8)}": url for url in unproven}
            self._trials.begin_probes(probes)
            for request_id, url in probes.items():
                self._give(OpenRequest.probe(request_id), [url])
            return

        # A group is replaced only if its engine has died. If only links were lost, no newer engine
        # will start.
        is_any_lost = any(engine.dead_because for engine in self.engines.values())

        def suitable(request: OpenRequest) -> list[str]:
            fit = request.num_deaths < 2 or not is_any_lost
            return [e.url for e in taking if fit or self._is_newer(e, request)]

        for request in self._trials.begin_turn(lambda request: bool(suitable(request))):
            self._give(request, suitable(request))

    def _is_newer(self, engine: KnownEngine, request: OpenRequest) -> bool:
        """Whether the engine was started after the death of the request's first engine.

        If lost engines are not replaced, the result is true for every engine.
        """
        return not self.outage.has_recovery or engine.added_s > request.first_death_s
