"""EngineClient connects an ingress or an LLM object to the engines of a deployment.

One I/O thread owns all sockets. If a link is lost, the engine drops all requests of that link. The
client sends these requests to another engine, or lets them wait (``request_table.py``). If the
deployment will start no other engine, the requests of the lost link end with an error, so that no
request hangs. After the loss of a link, the client opens a new link to the same engine. The client
uses the engine again after the first answer on the new link.

Each engine tells the client which engines exist (``GroupList``). The client sends requests to the
engines that accept new requests, by the rule of ``scheduler/routing.py``. If an engine drains, the
client closes its link to that engine as soon as the engine runs no request of this client.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from dist_aclgraph.actors.client.known_engine import Capacity, KnownEngine, SeenGroupState
from dist_aclgraph.actors.client.open_queries import OpenQueries, OpenQuery
from dist_aclgraph.actors.client.outage import Recovery
from dist_aclgraph.actors.client.request_table import STOPPING, RequestTable
from dist_aclgraph.actors.client.token_log import OnDelta, OpenRequest, TransferRole
from dist_aclgraph.actors.host.liveness import beat_s
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.context import make_context
from dist_aclgraph.actors.wire.engine_link import (
    LOSS_KINDS,
    EngineLink,
    LossKind,
)
from dist_aclgraph.actors.wire.messages import (
    Abort,
    Deltas,
    Goodbye,
    GroupList,
    Hello,
    QueryAnswer,
    QueryKind,
    Submit,
    ToEngine,
    failed,
    protocol,
)
from dist_aclgraph.actors.wire.sockets import Wakeup
from dist_aclgraph.arrays.ints import IntArray, pack_ints
from dist_aclgraph.errors import (
    DistAclGraphError,
    EngineDeadError,
    InvalidParameterError,
    PlacementError,
)
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.scheduler.routing import RequestRouter, RoutedCounts
from dist_aclgraph.steps.delta import RequestDelta

# Sizes that are assumed for an engine's cache until the engine reports the real sizes.
TOKENS_PER_BLOCK, CACHE_BLOCKS = 128, 4096

logger = logging.getLogger(__name__)


class EngineClient:
    """Owns the connections to the engines. Handles token ids only, never text.

    Args:
        addresses: addresses of the engines, one per lockstep group. The client names the groups
            0, 1, ... until an engine reports their names.
        node_id: Ray's id of the node of this process.
        token: the deployment's connection token.
        link_s: the configured ``timeouts.link_s``, in seconds. An engine that is silent for longer
            counts as dead.
        recovery: how requests wait while no group accepts requests. If None, requests fail at once.
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
        self._queries = OpenQueries()
        self._commands: queue.SimpleQueue[tuple[KnownEngine, ToEngine]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._context = make_context()
        self._hello = Hello(token, secrets.token_hex(8), protocol())
        self._node_id = node_id
        self._link_s = link_s
        self._groups_version = 0
        # The router prefers one of equally good groups. Each client chooses this group at random.
        router = RequestRouter(first=secrets.randbelow(len(addresses)))
        self._table = RequestTable(router, recovery, lambda *command: self._commands.put(command))
        for index, address in enumerate(addresses):
            self._add(str(index), address, CACHE_BLOCKS, TOKENS_PER_BLOCK)
        # Number of groups that run requests. Only the I/O thread changes it, so readers need no
        # lock.
        self.num_groups = len(addresses)
        self._beat_s = beat_s(link_s)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    @property
    def num_resumed(self) -> int:
        return self._table.num_resumed

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
        role: TransferRole = "",
        peer: BlockSource | None = None,
        wakes: bool = True,
    ) -> None:
        """Send a request to the engine that the router chooses.

        Args:
            params: ``max_tokens`` must be set; only the caller knows the model's context length.
            stop_ids: all token ids that end the output.
            on_delta: a function that the I/O thread calls with each delta, in order.
            seed: the seed for sampling if ``params`` has no seed.
            cache_salt: only requests with the same salt share cached blocks.
            output: int32, the request's existing tokens; the engine continues after these tokens.
            role: the role that an external router has chosen (``TransferRole``).
            peer: the group of another service that has computed the prompt; None if there is none.
            wakes: whether to wake the I/O thread; if False, the caller must call ``wake`` later.

        Raises:
            EngineDeadError: no engine is alive, and the deployment will start no other engine.
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
            role=role,
            peer=peer,
        )
        request.append(output)
        with self._lock:
            if request_id in self._table:
                raise InvalidParameterError(f"request id {request_id!r} is in use", "request_id")
            if self._closing.is_set() or not self._table.place(request, time.monotonic()):
                raise EngineDeadError(self._table.why_dead())
        if wakes:
            self.wake()

    def wake(self) -> None:
        """Let the I/O thread send all requests that were submitted."""
        self._wakeup.wake()

    def block_names(self, prompt_ids: Sequence[int], cache_salt: str) -> list[str]:
        """Return the names of the files with the KV of a prompt."""
        with self._lock:
            return self._table.router.block_names(pack_ints(prompt_ids), cache_salt)

    def blocks_of(self, group: str) -> BlockSource | None:
        """Return the source from which other groups fetch ``group``'s KV blocks, or None."""
        with self._lock:
            found = (each.blocks for each in self._table.engines.values() if each.name == group)
            return next(found, None)

    def abort(self, request_id: str) -> None:
        """Abort a request. Unknown ids are ignored."""
        with self._lock:
            engine = self._table.forget(request_id)
        if engine is not None:
            self._command(engine, Abort(request_id))

    def query(self, what: QueryKind, timeout_s: float = 5.0) -> dict[str, dict[str, Any]]:
        """Return the response of each living engine; the keys are the names of the groups.

        Engines that have drained, have died, or do not answer in time have no entry.

        Raises:
            EngineDeadError: no engine has answered.
        """
        self.raise_if_dead()
        asked: list[OpenQuery] = []
        for engine in self._known():
            # The query is opened before the check: a later loss of the engine then ends the query.
            opened = self._queries.open(engine, what)
            with self._lock:
                is_gone = engine.dead_because or engine.url not in self._table.engines
            if is_gone:
                self._queries.drop(opened)
                continue
            asked.append(opened)
            self._command(engine, opened.query)
        return self._queries.wait(asked, timeout_s, self.outage() or STOPPING)

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError if no engine is alive and the deployment will not start another."""
        with self._lock:
            capacity = Capacity.of(self._table.engines.values())
            is_alive = capacity.serving + capacity.draining or self._table.outage.may_end
            if not is_alive or not self._thread.is_alive():
                raise EngineDeadError(self._table.why_dead())

    def outage(self) -> str:
        """Return why no group serves, and the progress of the next start; "" if a group serves.

        A group serves if it both accepts and runs requests.
        """
        with self._lock:
            if taking := self._table.taking():
                pauses = [self._table.engines[url].link.pause for url in taking]
                return "" if "" in pauses else pauses[0]
            progress = self._table.outage.outlook.progress or "no other one has been started yet"
            return f"no group takes requests: {self._table.why_dead()}; recovering: {progress}"

    def outage_seconds(self) -> float:
        """Return the total time during which no group accepted requests."""
        with self._lock:
            return self._table.outage.seconds(time.monotonic())

    @property
    def num_held(self) -> int:
        """Number of requests that wait for a group, or for another run after an engine's death."""
        with self._lock:
            return self._table.num_held

    def num_losses(self) -> dict[LossKind, int]:
        """Return the number of lost engines for each kind of loss."""
        with self._lock:
            return {kind: self._table.losses[kind] for kind in LOSS_KINDS}

    def capacity(self) -> Capacity:
        with self._lock:
            return Capacity.of(self._table.engines.values())

    def states(self) -> dict[str, SeenGroupState]:
        with self._lock:
            return {engine.name: engine.state for engine in self._table.engines.values()}

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a call of ``close``. Return whether it was called."""
        return self._closing.wait(timeout_s)

    def routed(self) -> dict[str, RoutedCounts]:
        """Return how many requests were routed to each group; the keys are the groups' names."""
        with self._lock:
            return self._table.routed()

    def _known(self) -> list[KnownEngine]:
        with self._lock:
            return list(self._table.engines.values())

    def _add(self, name: str, address: Address, cache_blocks: int, tokens_per_block: int) -> None:
        """Add an engine, or update the sizes of its cache.

        Once the I/O thread runs, the caller must hold the lock.
        """
        endpoint = address.seen_from(self._node_id)
        self._table.add(
            name,
            address.file.url,
            partial(EngineLink, self._context, endpoint, self._hello, self._link_s),
            time.monotonic(),
            cache_blocks=cache_blocks,
            tokens_per_block=tokens_per_block,
        )

    def close(self) -> None:
        """End all requests and the I/O thread. Idempotent; not for use inside ``on_delta``."""
        if not self._closing.is_set():
            self._closing.set()
            self._wakeup.wake()
            self._thread.join()
            if self._table.outage.outlook_poller is not None:
                self._table.outage.outlook_poller.close()
            self._wakeup.close()
            self._context.term()

    # -- I/O thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = STOPPING
        try:
            self._serve()
        # Catch every exception, because all requests must end with an error if this thread fails.
        except Exception as e:
            logger.exception("the client's thread has ended")
            reason = f"{type(e).__name__}: {e}"
        self._closing.set()
        for engine in self._known():
            self._lose(engine, reason)
        with self._lock:
            waiting = self._table.take_waiting()
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
        """Apply the controller's last ``Outlook``, and end requests that have waited too long."""
        outlook = None
        if self._table.outage.outlook_poller is not None:
            outlook = self._table.outage.outlook_poller.take_answer()
        if outlook is not None:
            if outlook.groups.groups:
                self._follow(outlook.token, outlook.node_id)
            self._adopt(outlook.groups)
        now_s = time.monotonic()
        with self._lock:
            engines = self._table.engines.values()
            self.num_groups = sum(not engine.dead_because for engine in engines)
            over = self._table.look(now_s, outlook)
        for request, error in over:
            self._end(request, error)

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
                load = self._table.router.load(engine.url)
            try:
                engine.link.beat(load, self._groups_version)
            except EngineDeadError as e:
                self._lose(engine, str(e))
        return is_new

    def _leave(self, engine: KnownEngine) -> bool:
        """Remove ``engine`` if it has drained. Return whether it was removed."""
        with self._lock:
            is_over = engine.link.is_lost or not (engine.is_listed or engine.requests)
            if not (engine.is_draining and is_over):
                return False
            self._table.remove(engine)
        if not engine.link.is_lost:
            engine.link.send(Goodbye())
        engine.link.close()
        engine.link.is_lost = True  # ``_send_commands`` drops commands for a lost link
        self._queries.end(engine, None)
        return True

    def _follow(self, token: str, node_id: str) -> None:
        """If the token is new, switch to the deployment of this token.

        List versions of two deployments are unrelated, so the last version is forgotten.
        """
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
            for url, engine in self._table.engines.items():
                engine.is_listed = url in listed
                engine.is_draining = not engine.is_listed or listed[url].is_draining
            for url, entry in listed.items():
                if url not in self._table.engines and entry.is_draining:
                    continue
                try:
                    self._add(entry.name, entry.address, entry.cache_blocks, entry.tokens_per_block)
                    engine = self._table.engines[url]
                    engine.prefill_from, engine.blocks = entry.prefill_from, entry.blocks
                except PlacementError as e:  # this client cannot reach the engine, but others may
                    logger.warning("group %s cannot be used from here: %s", entry.name, e)

    def _receive(self, engine: KnownEngine) -> None:
        if engine.link.is_lost:
            return
        try:
            for message in engine.link.receive():
                if isinstance(message, QueryAnswer):
                    self._queries.answer(engine, message)
                elif isinstance(message, GroupList):
                    self._adopt(message)
                else:
                    self._deliver(engine, message)
        except EngineDeadError as e:
            self._lose(engine, str(e))
            return
        with self._lock:
            self._table.router.hear(engine.url, engine.link.others_tokens)
            if engine.dead_because and engine.link.is_welcome:
                engine.dead_because = ""

    def _deliver(self, engine: KnownEngine, message: Deltas) -> None:
        """Pass the deltas of a step to the callbacks.

        Raises:
            EngineDeadError: the engine has ended; ``_lose`` must handle its unfinished requests.
        """
        with self._lock:  # locked once for all requests of a step
            told, death = self._table.take_deltas(engine, message)
            over = self._table.continue_elsewhere(time.monotonic())
        for on_delta, delta in told:
            self._tell(on_delta, delta)
        for request in over:
            self._end(request, EngineDeadError(self._table.why_dead()))
        if death:
            raise EngineDeadError(death)

    def _end(self, request: OpenRequest, error: DistAclGraphError) -> None:
        """End a request that will not be continued."""
        if request.is_cause:
            reason = (
                f"{request.num_deaths} engines died while they ran this request, all of them near "
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
        """Let other engines continue the requests of ``engine``. End the queries to ``engine``."""
        # The lock is held until all requests are moved. So an abort never sees a request between
        # two engines.
        with self._lock:
            is_over = self._closing.is_set()
            over = self._table.lose(engine, reason, time.monotonic(), is_over=is_over)
        for request in over:
            self._end(request, EngineDeadError(reason))
        self._queries.end(engine, EngineDeadError(reason))

    def _command(self, engine: KnownEngine, message: ToEngine) -> None:
        self._commands.put((engine, message))
        self.wake()

    def _send_commands(self) -> None:
        while not self._commands.empty():
            engine, message = self._commands.get()
            # The request's link was lost, and the client has moved the request to another engine.
            # So the request must not be sent over the new link to this engine.
            if isinstance(message, Submit) and message.number not in engine.names:
                continue
            if not engine.link.is_lost:
                engine.link.send(message)
