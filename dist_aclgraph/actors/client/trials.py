"""Trials: requests that lost their engine run one after another until each has a new token.

A request may be the cause of its engine's death, and would then end every engine that runs it. The
client cannot know which of the lost requests it was, so it tries them in turns. If an engine dies
in the turn of a single request, this request is probably the cause. To exclude an engine that
cannot run anything, the first turn on each engine belongs to a request of the client's own.
"""

from __future__ import annotations

from collections.abc import Collection

from dist_aclgraph.actors.client.token_log import OpenRequest

# More requests than this take their turns in groups of equal size, so that a large batch does not
# wait for thousands of steps.
MAX_TURNS = 64


class Trials:
    """Owns the requests that wait for their turn. The client's lock guards this object."""

    def __init__(self) -> None:
        self._waiting: dict[str, OpenRequest] = {}
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
        return any(request.is_suspect for request in self._waiting.values())

    def begin_probes(self, request_ids: Collection[str]) -> None:
        """Begin a turn of requests of the client's own."""
        self._running.update(request_ids)

    def wait(self, request: OpenRequest) -> None:
        """Add a request, which waits for its turn."""
        self._waiting[request.request_id] = request

    @property
    def alone(self) -> str | None:
        """The id of the current turn's request, if this turn has only one."""
        return next(iter(self._running)) if len(self._running) == 1 else None

    def begin_turn(self) -> list[OpenRequest]:
        """Remove and return the requests of the next turn; empty while a turn goes on.

        The last turn has all requests that are no suspects.
        """
        if self._running:
            return []
        suspects = [request for request in self._waiting.values() if request.is_suspect]
        turn = suspects[: -(-len(suspects) // MAX_TURNS)] or list(self._waiting.values())
        for request in turn:
            del self._waiting[request.request_id]
        self._running = {request.request_id for request in turn if request.is_suspect}
        return turn

    def leave(self, request_id: str) -> None:
        """Remove a request that has a new token, or has ended, or has lost its engine again."""
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)

    def take_waiting(self) -> list[OpenRequest]:
        """Remove and return all requests that wait for their turn."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting
