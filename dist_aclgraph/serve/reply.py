"""One generation as one HTTP response, whole or streamed; a client that leaves ends it."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dist_aclgraph.serve import sse
from dist_aclgraph.serve.errors import json_response
from dist_aclgraph.serve.generation import (
    ChoicePiece,
    ClientGoneError,
    Generation,
    Pieces,
    unless_gone,
)
from dist_aclgraph.serve.state import ApiState

CLIENT_GONE = 499  # only ever logged: nobody is there to read it


class Reply(ABC):
    """How an endpoint shapes pieces of text."""

    def __init__(self, state: ApiState, prefix: str) -> None:
        self.state = state
        self._id = state.new_id(prefix)
        self._created_s = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self.state.config.name,
            "system_fingerprint": None,
        }

    @abstractmethod
    def chunks(self, generation: Generation, pieces: Pieces) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream."""

    @abstractmethod
    async def whole(self, generation: Generation, pieces: Pieces) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""


async def reply(
    request: Request, generation: Generation, shape: Reply, *, stream: bool
) -> Response:
    """Run a generation and answer with it.

    A stream begins once its first piece is there, so that a request which the engine refuses gets
    a proper status and not a broken stream.
    """
    pieces = generation.pieces()
    with contextlib.ExitStack() as stack:
        stack.enter_context(generation)
        try:
            if not stream:
                body = await unless_gone(request, shape.whole(generation, pieces))
                return json_response(body)
            first = await unless_gone(request, anext(pieces))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        frames = sse.events(shape.chunks(generation, _after(first, pieces)))
        return _Stream(frames, held=stack.pop_all())


class _Stream(StreamingResponse):
    """A stream that holds its generation: it ends with the response, however that ends.

    The response may be cancelled before the first frame is asked for; a generator that never
    began has no ``finally``.
    """

    def __init__(self, frames: AsyncIterator[bytes], held: contextlib.ExitStack) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=sse.HEADERS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def gather(pieces: Pieces) -> list[ChoicePiece]:
    """Return one whole piece per choice."""
    merged: dict[int, ChoicePiece] = {}
    async for piece in pieces:
        before = merged.get(piece.index)
        merged[piece.index] = (
            piece
            if before is None
            else replace(
                piece,
                text=before.text + piece.text,
                logprobs=before.logprobs + piece.logprobs,
            )
        )
    return [merged[index] for index in sorted(merged)]


async def _after(first: ChoicePiece, rest: Pieces) -> Pieces:
    yield first
    async for piece in rest:
        yield piece
