"""One generation as one HTTP response, whole or streamed; a client that leaves ends it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dist_aclgraph.serve import sse
from dist_aclgraph.serve.errors import json_response
from dist_aclgraph.serve.generation import ClientGoneError, Generation, Piece, unless_gone
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
    def chunks(
        self, generation: Generation, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream."""

    @abstractmethod
    async def whole(self, generation: Generation, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""


async def reply(
    request: Request, generation: Generation, shape: Reply, *, stream: bool
) -> Response:
    """Run a generation and answer with it.

    A stream begins once its first piece is there, so that a request which the engine refuses gets
    a proper status and not a broken stream.
    """
    generation.__enter__()
    pieces = generation.pieces()
    try:
        if not stream:
            body = await unless_gone(request, shape.whole(generation, pieces))
            return json_response(body)
        first = await unless_gone(request, anext(pieces))
    except ClientGoneError:
        generation.close()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        generation.close()
        raise
    return StreamingResponse(
        _stream(generation, shape, _after(first, pieces)),
        media_type="text/event-stream",
        headers=sse.HEADERS,
    )


async def gather(pieces: AsyncIterator[Piece]) -> list[Piece]:
    """Return one whole piece per choice."""
    merged: dict[int, Piece] = {}
    async for piece in pieces:
        before = merged.get(piece.index)
        merged[piece.index] = (
            piece
            if before is None
            else replace(
                piece,
                text=before.text + piece.text,
                token_ids=before.token_ids + piece.token_ids,
                logprobs=before.logprobs + piece.logprobs,
            )
        )
    return [merged[index] for index in sorted(merged)]


async def _after(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


async def _stream(
    generation: Generation, shape: Reply, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    with_frames = sse.events(shape.chunks(generation, pieces))
    try:
        async for frame in with_frames:
            yield frame
    finally:  # also when the client leaves: the generator is cancelled or closed
        generation.close()
