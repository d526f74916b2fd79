"""OpenQueries: a client's queries that engines have not answered yet."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from dist_aclgraph.actors.client.known_engine import KnownEngine
from dist_aclgraph.actors.wire.messages import Query, QueryAnswer, QueryKind
from dist_aclgraph.errors import EngineDeadError


class OpenQuery(NamedTuple):
    """A query to one engine; the future gets the engine's answer."""

    engine: KnownEngine
    query: Query
    future: Future[dict[str, Any]]


class OpenQueries:
    """Owns the queries of one client. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[tuple[KnownEngine, int], OpenQuery] = {}

    def open(self, engine: KnownEngine, what: QueryKind) -> OpenQuery:
        """Return a new query, which the caller sends to the engine."""
        opened = OpenQuery(engine, Query(next(self._ids), what), Future())
        with self._lock:
            self._open[engine, opened.query.query_id] = opened
        return opened

    def answer(self, engine: KnownEngine, answer: QueryAnswer) -> None:
        """Pass an engine's answer to the waiting thread; ignore late answers."""
        with self._lock:
            found = self._open.pop((engine, answer.query_id), None)
        if found is not None:
            found.future.set_result(json.loads(answer.body))

    def end(self, engine: KnownEngine, error: EngineDeadError | None) -> None:
        """End the queries to an engine.

        Args:
            error: the error that says why the engine is dead; None if the engine has drained.
        """
        with self._lock:
            ended = [self._open.pop(key) for key in list(self._open) if key[0] is engine]
        for each in ended:
            if error is None:
                each.future.cancel()
            else:
                each.future.set_exception(error)

    def drop(self, opened: OpenQuery) -> None:
        """Remove a query, so that an answer to this query is ignored."""
        with self._lock:
            self._open.pop((opened.engine, opened.query.query_id), None)

    def wait(
        self, asked: Sequence[OpenQuery], timeout_s: float, problem: str
    ) -> dict[str, dict[str, Any]]:
        """Return the answers that arrive before the timeout. The keys are the names of the engines'
        groups.

        Args:
            problem: text of the error that is raised if no engine was queried, or if all queried
                engines were removed.

        Raises:
            EngineDeadError: no engine has answered.
        """
        deadline_s = time.monotonic() + timeout_s
        answers: dict[str, dict[str, Any]] = {}
        for each in asked:
            engine, query, future = each
            try:
                answers[engine.name] = future.result(max(0.0, deadline_s - time.monotonic()))
            except CancelledError:  # the engine was removed
                continue
            except EngineDeadError as e:
                problem = str(e)
            except FutureTimeoutError:
                problem = f"no answer to {query.what} within {timeout_s:g} s"
                self.drop(each)
        if not answers:
            raise EngineDeadError(problem)
        return answers
