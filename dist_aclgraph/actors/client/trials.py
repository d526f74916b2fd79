"""Trials: requests that lost their engine run in turns, until each of them has a new token.

A request may be the cause of its engine's death, and would then end every engine that runs it. The
client cannot know which of the lost requests it was, so it tries them in turns. A request that lost
two engines at the same token runs alone, and only on an engine that has started since its first
loss: several engines may have died together for another reason. If this engine dies, too, the
request is the cause. To exclude an engine that cannot run anything, the first turn on each engine
belongs to a request of the client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dist_aclgraph.actors.client.token_log import OpenRequest

# More requests than this take their turns in groups of equal size, so that a large batch does not
# wait for thousands of steps.
MAX_TURNS = 64


class Trials:
    """Owns the requests that wait for their turn. The client's lock guards this object."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[OpenRequest, float]] = {}  # with the end of the wait
        self._running: set[str] = set()

    def __len__(self) -> int:
        """The number of requests that wait for their turn."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def is_turn(self) -> bool:
        """Whether requests of a turn run, and have no new token yet."""
        return bool(self._running)

    @property
    def has_suspects(self) -> bool:
        """Whether a request that may be the cause of a death waits for its turn."""
        return any(request.is_suspect for request, _ in self._waiting.values())

    @property
    def alone(self) -> str | None:
        """The id of the current turn's request, if this turn has only one."""
        return next(iter(self._running)) if len(self._running) == 1 else None

    def wait(self, request: OpenRequest, until_s: float) -> None:
        """Add a request, which waits for its turn."""
        self._waiting[request.request_id] = request, until_s

    def begin_probes(self, request_ids: Collection[str]) -> None:
        """Begin a turn of requests of the client's own."""
        self._running.update(request_ids)

    def begin_turn(self, has_engine: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """Remove and return the requests of the next turn; empty while a turn goes on.

        First come requests that lost one engine, then requests that lost several engines, one by
        one, and then all requests that lost none.

        Args:
            has_engine: returns whether there is an engine on which a request may run.
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
        """Remove a request that has a new token, or has ended, or has lost its engine again."""
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)

    def take_waiting(self, now_s: float | None = None) -> list[OpenRequest]:
        """Remove and return the requests that wait for their turn.

        Args:
            now_s: if not None, only requests whose wait has ended are returned.
        """
        taken = [r for r, until_s in self._waiting.values() if now_s is None or until_s <= now_s]
        for request in taken:
            del self._waiting[request.request_id]
        return taken
