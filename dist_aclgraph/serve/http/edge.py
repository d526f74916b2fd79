"""The outermost layer of the API. It refuses requests before their bodies are read.

If no slot is free, a server with support for ``GatedApp`` reads only the first line of a request,
and then refuses the request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dist_aclgraph.errors import DistAclGraphError, QueueFullError
from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.key_limits import KeyLimits
from dist_aclgraph.serve.http.refusal import Refusal
from dist_aclgraph.serve.observe.request_account import (
    ACCOUNT,
    FIRST_ERROR,
    KEY_NAME,
    RequestAccount,
    note_error,
)
from dist_aclgraph.serve.openai.body import HeldBody
from dist_aclgraph.serve.openai.completion_slots import full_error
from dist_aclgraph.serve.openai.errors import error_response
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.journal import JOURNAL, RESUMED

GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
    }
)
_GENERATING_BYTES = frozenset(path.encode() for path in GENERATING)
REQUEST_ID = b"x-request-id"
_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """Checks a request's access, its limits and the free slots, then passes the request
    to the API.

    Owns the request counts of the API keys.

    Args:
        methods_of: a function that returns the value of the header Allow: the methods that a
            request's path supports.
        names_requests: whether responses get the header X-Request-Id, with the client's request id
            or a new id; false if a proxy adds the header.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        state: ApiState,
        methods_of: Callable[[Scope], str],
        *,
        names_requests: bool = True,
    ) -> None:
        self._app = app
        self._methods_of = methods_of
        self._access = access
        self._state = state
        self._names_requests = names_requests
        self._limits = KeyLimits()

    def refusal(self, method: bytes, path: bytes) -> Refusal | None:
        """See ``GatedApp``. The keys are not checked: a client without a key learns only that the
        service is full.
        """
        slots = self._state.slots
        # The refusal would need CORS headers. They depend on headers that have not been read yet.
        if self._access.origins:
            return None
        if method == b"POST" and path in _GENERATING_BYTES and slots.is_full:
            self._state.metrics.refused(503)
            if self._state.config.logging.access:
                line = {"method": method.decode(), "path": path.decode()}
                RequestAccount("-", line, status=503, error=QueueFullError.__name__).write()
            return _full(slots.total, path.decode())
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _plain_path(scope)
        headers = dict(scope["headers"])
        name = headers.get(REQUEST_ID, b"")
        if self._names_requests:
            name = request_name(name)
            send = _adding(send, [(REQUEST_ID, name)])
        has_line = self._state.config.logging.access
        traces = self._state.traces if scope["method"] == "POST" else None
        if not has_line and traces is None:
            await self._answer(scope, receive, self._counting(send, None), headers)
            return
        account = RequestAccount(name.decode("latin-1") or "-", scope)
        scope[ACCOUNT] = account
        try:
            await self._answer(scope, receive, self._counting(send, account), headers)
        finally:
            if has_line:
                account.write()
            if traces is not None:
                traces.export(account)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> None:
        if cors := self._access.cors_headers(headers):
            send = _adding(send, cors)
        path = _own_path(scope)
        app: ASGIApp
        with ExitStack() as held:
            try:
                if scope["method"] == "OPTIONS":
                    app = self._preflight(scope, headers)
                else:
                    receive = self._admit(scope, path, headers, receive, held)
                    app = self._app
            except DistAclGraphError as e:
                note_error(scope, e)
                app = error_response(e, path)
            await app(scope, receive, send)

    def _preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> Response:
        response = Response(status_code=204)
        response.raw_headers += self._access.preflight(headers, self._methods_of(scope).encode())
        return response

    def _admit(
        self,
        scope: Scope,
        path: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        held: ExitStack,
    ) -> Receive:
        """Admit a request; return the callable that reads its body.

        Args:
            held: an exit stack that is closed when the request has ended, and then frees the
                request's slots, counts and memory.

        Raises:
            DistAclGraphError: the request is refused.
        """
        key = self._access.authorize(scope["method"], path, headers)
        if key is not None:
            scope[KEY_NAME] = key.name
        if scope["method"] != "POST":
            return receive
        extensions = scope.get("extensions", {})
        is_owed = RESUMED in extensions
        if path in GENERATING:
            self._state.admit(None)
            self._state.slots.acquire(1, is_owed=is_owed)
            held.callback(self._state.slots.release, 1)
        if key is not None:
            self._limits.begin(key, is_owed=is_owed)
            held.callback(self._limits.end, key)
        # A journal keeps the body until the request is answered.
        copies = 2 if JOURNAL in extensions else 1
        body = HeldBody(self._state.bodies, receive, copies=copies, is_owed=is_owed)
        held.callback(body.release)
        return body

    def _counting(self, send: Send, account: RequestAccount | None) -> Send:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= FIRST_ERROR:
                    self._state.metrics.refused(message["status"])
                if account is not None:
                    account.status = message["status"]
            await send(message)

        return send_and_count


@lru_cache
def _full(total: int, path: str) -> Refusal:
    return Refusal(error_response(full_error(total, total), path))


def _own_path(scope: Scope) -> str:
    """Remove the route prefix from the path in the same way as Starlette's router.

    Ray Serve's proxy puts the route prefix into ``root_path``, and does not remove the prefix from
    ``path``. If the path is only the prefix, the router redirects the client to ``/``.
    """
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    if rest == path or rest.startswith("/"):
        return rest
    return path if rest else "/"


def _plain_path(scope: Scope) -> str:
    """Return the path without repeated slashes and without a slash at its end, because clients join
    addresses and paths in several ways. The path of the root keeps its slash.
    """
    path = _SLASHES.sub("/", scope["path"])
    shorter = path.removesuffix("/")
    return path if shorter == scope.get("root_path", "") else shorter


def request_name(given: bytes) -> bytes:
    """Return the request id that the client has sent, or a new id."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12).encode()


def _adding(send: Send, added: list[tuple[bytes, bytes]]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return send_with_headers
