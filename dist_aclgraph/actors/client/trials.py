"""Trials: runs the requests of lost engines again. The requests run in turns: the next turn begins
when each request of the current turn has made progress or has ended.

A request might be the cause of its engine's death. Such a request would end every engine that runs
it. The client does not know which request caused an engine's death, so the client does not run all
these requests in the same turn. A request that lost two engines without progress runs alone. But
its engines may have died together for another reason. So this request waits for an engine that
started after the request's first engine died. If this engine also dies, the request counts as the
cause of the engines' deaths. An engine might also be broken, so that every request on this engine
fails. To find such an engine, the first turn on each engine runs a probe, which is a request that
the client makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dist_aclgraph.actors.client.token_log import OpenRequest

# If more than this number of requests wait, several requests share a turn, so that a large batch
# does not wait for thousands of turns.
MAX_TURNS = 64


class Trials:
    """Owns the requests that wait for a turn after the loss of an engine or after an outage. The
    client's lock guards this object.
    """

    def __init__(self) -> None:
        # The keys are request ids. The values are the request, and the time at which its wait ends.
        self._waiting: dict[str, tuple[OpenRequest, float]] = {}
        self._running: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def is_turn(self) -> bool:
        """Whether a turn with requests of dead engines is in progress. A turn runs until each of
        its requests has made progress or has ended.
        """
        return bool(self._running)

    @property
    def has_suspects(self) -> bool:
        """Whether a request that might have caused its engine's death is waiting for its turn."""
        return any(request.is_suspect for request, _ in self._waiting.values())

    @property
    def alone(self) -> str | None:
        """The id of the current turn's request if this turn has exactly one request; otherwise
        None.
        """
        return next(iter(self._running)) if len(self._running) == 1 else None

    def wait(self, request: OpenRequest, until_s: float) -> None:
        """Add a request that lost its engine. The request waits for its turn to run again."""
        self._waiting[request.request_id] = request, until_s

    def begin_probes(self, request_ids: Collection[str]) -> None:
        """Begin a turn whose requests are the client's probes with these ids."""
        self._running.update(request_ids)

    def begin_turn(self, has_engine: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """Remove and return the requests that run again in the next turn. While a turn runs, return
        an empty list.

        The first turns contain requests that lost one engine. Then each turn contains a single
        request that lost several engines. The last turn contains all requests that are no suspects,
        e.g. requests that waited during an outage.

        Args:
            has_engine: a function that returns whether a given request may run on one of the
                engines.
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
        """Remove and return the requests that wait for their turn to run again.

        Args:
            now_s: the present time. A request is returned if its wait ends at this time or earlier.
                If None, all requests are returned.
        """
        taken = [r for r, until_s in self._waiting.values() if now_s is None or until_s <= now_s]
        for request in taken:
            del self._waiting[request.request_id]
        return taken
