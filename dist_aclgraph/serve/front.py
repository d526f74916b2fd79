"""Front: what listens from the first second to the last; 503 while there is no API behind it."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.serve.edge import Edge
from dist_aclgraph.serve.errors import error_response
from dist_aclgraph.serve.refusal import Refusal


class Front:
    """An application whose API comes and goes. ``reason`` says why there is none."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._api: Edge | None = None

    def open(self, api: Edge) -> None:
        """Pass requests on from now on."""
        self._api = api

    def close(self, reason: str) -> None:
        """Refuse new requests; those that are inside go on."""
        self._reason, self._api = reason, None

    def refusal(self, method: bytes, path: bytes) -> Refusal | None:
        """See ``GatedApp``."""
        return self._api.refusal(method, path) if self._api is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._api or error_response(EngineUnavailableError(self._reason))
        await app(scope, receive, send)
