"""The application of the server. While there is no API, this application responds with 503.

The application always serves the status page. While there is no API, the page shows the reason, and
polls until there is an API. While there is no API, other requests wait for a moment before they get
the 503. Usually, the API is missing because this process has just replaced another process. The
wait hides the replacement from clients.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.serve.http.edge import Edge
from dist_aclgraph.serve.http.refusal import Refusal
from dist_aclgraph.serve.observe.status import page_response
from dist_aclgraph.serve.openai.errors import error_response

PATIENCE_S, LOOK_S = 3.0, 0.02


class Front:
    """An application whose API can be opened and closed. ``reason`` says why there is no API."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._api: Edge | None = None
        self._is_opening = True

    def open(self, api: Edge) -> None:
        """Pass all later requests to the API."""
        self._api = api

    def close(self, reason: str) -> None:
        """Refuse new requests; requests that were admitted continue."""
        self._reason, self._api, self._is_opening = reason, None, False

    @property
    def is_open(self) -> bool:
        """Whether requests are passed to an API."""
        return self._api is not None

    def refusal(self, method: bytes, path: bytes) -> Refusal | None:
        """See ``GatedApp``."""
        return self._api.refusal(method, path) if self._api is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._wait()
        await (self._api or self._stand_in(scope))(scope, receive, send)

    async def _wait(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self._api is None and self._is_opening and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)

    def _stand_in(self, scope: Scope) -> ASGIApp:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/"):
            return page_response()
        return error_response(EngineUnavailableError(self._reason))
