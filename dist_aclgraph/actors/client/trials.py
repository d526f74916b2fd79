"""Trials: requests that lost their engine run in turns, until each of them has made progress.

A request might be the cause of its engine's death. Such a request would end every engine that runs
it. The client does not know which of an engine's requests was the cause, so the client tries the
requests in turns. A request that lost two engines without progress runs alone, and only on an
engine that has started since the request's first loss, because several engines may have died
together for another reason. If this engine dies, too, the request is the cause. An engine might
also be broken, so that every request on it fails. To find such an engine, the first turn on each
engine runs a probe, which is a request that the client makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dist_aclgraph.actors.client.token_log import OpenRequest

# If more than this number of requests wait, several requests share a turn, so that a large batch
# does not wait for thousands of turns.
MAX_TURNS = 64


class Trials:
    """Owns the requests that wait for their turn. The client's lock guards this object."""

    def __init__(self) -> None:
        # Each item is a request, and the time at which its wait ends.
        self._waiting: dict[str, tuple[OpenRequest, float]] = {}
        self._running: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def is_turn(self) -> bool:
        """Whether a turn is running: some of its requests have made no progress yet."""
        return bool(self._running)

    @property
    def has_suspects(self) -> bool:
        """Whether a request that might be the cause of a death waits for its turn."""
        return any(request.is_suspect for request, _ in self._waiting.values())

    @property
    def alone(self) -> str | None:
        """The id of the current turn's request, if this turn has exactly one request."""
        return next(iter(self._running)) if len(self._running) == 1 else None

    def wait(self, request: OpenRequest, until_s: float) -> None:
        """Add a request, which waits for its turn."""
        self._waiting[request.request_id] = request, until_s

    def begin_probes(self, request_ids: Collection[str]) -> None:
        """Begin a turn that consists of the client's probes."""
        self._running.update(request_ids)

    def begin_turn(self, has_engine: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """Remove the requests of the next turn and return them; an empty list while a turn runs.

        The turns come in this order: requests that lost one engine; then requests that lost several
        engines, one request in each turn; then all requests that lost no engine.

        Args:
            has_engine: a function that returns whether there is an engine on which a given request
                may run.
        """
        if self._running:
            return []
        requests = [request for request, _ in self._waiting.values()]
        once = [request for request in requests if request.num_deaths == 1]
        often = [r for r in requests if r.num_deaths > 1 and has_engine(r)]
        never = [request for request in requests if not request.is_suspect]
        turn = once[: -(-len(once) // MAX_TURNS)] or often[:1] or never
        for request in turn:
            del self._waiting[request.request_id]
        self._running = {request.request_id for request in turn if request.is_suspect}
        return turn

    def leave(self, request_id: str) -> None:
        """Remove a request that has made progress, or has ended, or has lost its engine again."""
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)

    def take_waiting(self, now_s: float | None = None) -> list[OpenRequest]:
        """Remove and return the requests that wait for their turn.

        Args:
            now_s: the present time: only requests whose wait has ended by then are returned. None
                returns all requests.
        """
        taken = [r for r, until_s in self._waiting.values() if now_s is None or until_s <= now_s]
        for request in taken:
            del self._waiting[request.request_id]
        return taken
