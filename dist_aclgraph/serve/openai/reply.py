"""Sends a generation as one HTTP response, whole or streamed.

If the client disconnects, the generation is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dist_aclgraph.serve.openai import sse
from dist_aclgraph.serve.openai.errors import json_response
from dist_aclgraph.serve.openai.generation import (
    ChoicePiece,
    ClientGoneError,
    Generation,
    Usage,
    unless_gone,
)
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import StreamOptions
from dist_aclgraph.serve.resume.journal import Chance

_json = msgspec.json.Encoder()
CLIENT_GONE = 499  # a status for logs only: the client has disconnected


class ReplyShape(ABC):
    """Converts pieces of text to the reply of one endpoint.

    Attributes:
        shows_usage_so_far: whether ``frames`` gets the token counts so far in its argument
            ``usage``.
    """

    shows_usage_so_far: bool = False

    @abstractmethod
    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        """Return the frames of a piece.

        Args:
            usage: the token counts so far; None if ``shows_usage_so_far`` is false.
        """

    @abstractmethod
    def last_frames(self, generation: Generation) -> bytes:
        """Return the frames that follow the frames of the last piece."""

    @abstractmethod
    def whole(self, generation: Generation, pieces: list[list[ChoicePiece]]) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""

    def error_frames(self, generation: Generation, error: Exception) -> bytes:
        """Return the frames that end a stream after an error, in place of ``last_frames``."""
        return sse.error_frame(error)


class Reply(ReplyShape):
    """A reply that consists of choices, and whose stream ends with [DONE].

    Args:
        prefix: prefix of the reply's id.
        kind: object type of a whole reply, and of a chunk of a streamed reply.
    """

    def __init__(
        self,
        state: ApiState,
        prefix: str,
        kind: tuple[str, str],
        streaming: StreamOptions,
        chance: Chance,
    ) -> None:
        self.state = state
        self._kind, chunk_kind = kind
        self._shows_usage = streaming.include_usage
        self.shows_usage_so_far = streaming.include_usage and streaming.continuous_usage_stats
        self._common = {
            "id": f"{prefix}-{chance.name}",
            "created": chance.created_s,
            "model": state.config.name,
            "system_fingerprint": None,
        }
        # The common part of all chunks is encoded only once. For each chunk, only its choice is
        # encoded.
        head = _json.encode({**self._common, "object": chunk_kind})
        self._chunk_begin = b"data: " + head[:-1] + b',"choices":['
        self._chunk_end = b'],"usage":null}\n\n' if self._shows_usage else b"]}\n\n"

    def body(self, choices: list[dict[str, Any]], usage: dict[str, object]) -> dict[str, Any]:
        return {**self._common, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, usage: Usage | None, choice: dict[str, Any]) -> bytes:
        """Return the frame of a chunk with one choice.

        Args:
            usage: the token counts so far; None if the client has not requested them.
        """
        end = self._chunk_end
        if usage is not None:
            end = b'],"usage":' + _json.encode(usage.as_json()) + b"}\n\n"
        return self._chunk_begin + _json.encode(choice) + end

    def last_frames(self, generation: Generation) -> bytes:
        if not self._shows_usage:
            return sse.DONE
        usage = _json.encode(generation.usage.as_json())
        return self._chunk_begin + b'],"usage":' + usage + b"}\n\n" + sse.DONE


async def reply(
    request: Request, generation: Generation, shape: ReplyShape, *, stream: bool
) -> Response:
    """Run a generation and answer the request with its text.

    A stream does not begin before the first piece. If the engine refuses the request before the
    first piece, the response has the error's HTTP status.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(generation.close)
        try:
            if not stream:
                gathered = _Gathered()
                generation.start(gathered)
                pieces = await unless_gone(request.receive, gathered.pieces())

                def make() -> Response:
                    return json_response(shape.whole(generation, pieces))

                # Encoding the log-probabilities of a long prompt takes a long time. A thread
                # encodes them, so that the streams of other requests are not delayed.
                is_long = any(piece.prompt_logprobs for choice in pieces for piece in choice)
                response = await asyncio.to_thread(make) if is_long else make()
                return _Held(response, stack.pop_all())
            frames = _Frames(shape, generation)
            generation.start(frames)
            await unless_gone(request.receive, frames.begun())
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        return _Stream(frames.outlet, held=stack.pop_all())


async def gather(request: Request, generation: Generation) -> list[ChoicePiece]:
    """Run a generation, and return the whole text of each choice as one piece.

    Raises:
        ClientGoneError: the client has disconnected.
        DistAclGraphError: the generation failed.
    """
    try:
        gathered = _Gathered()
        generation.start(gathered)
        pieces = await unless_gone(request.receive, gathered.pieces())
        return [joined(choice) for choice in pieces]
    finally:
        generation.close()


class _Gathered:
    """Receives the pieces of a reply that is not streamed."""

    def __init__(self) -> None:
        self._of_choice: dict[int, list[ChoicePiece]] = {}
        self._ended: asyncio.Future[Exception | None] = _future()

    def add_piece(self, piece: ChoicePiece) -> None:
        self._of_choice.setdefault(piece.index, []).append(piece)

    def finish(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    async def pieces(self) -> list[list[ChoicePiece]]:
        """Return the pieces of each choice.

        Raises:
            DistAclGraphError: the generation failed.
        """
        if (error := await self._ended) is not None:
            raise error
        return [self._of_choice[index] for index in sorted(self._of_choice)]


def joined(pieces: list[ChoicePiece]) -> ChoicePiece:
    """Return a choice's pieces as one piece."""
    return ChoicePiece(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        tuple(row for piece in pieces for row in piece.logprobs),
        tuple(text for piece in pieces for text in piece.token_texts),
        pieces[-1].finish_reason,
        [token_id for piece in pieces for token_id in piece.token_ids],
        next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ()),
        pieces[-1].has_end_token,
        tuple(event for piece in pieces for event in piece.events),
        pieces[-1].embedding,
        pieces[-1].stop_reason,
    )


class _Frames:
    """Receives the pieces of a stream, and sends their frames in the order of the pieces.

    If a piece contains a prompt's log-probabilities, encoding its frame takes a long time. A thread
    encodes such a frame, so that other streams do not wait. Later frames of the stream wait until
    this frame is encoded.
    """

    def __init__(self, shape: ReplyShape, generation: Generation) -> None:
        self.outlet = sse.Outlet()
        self._shape = shape
        self._generation = generation
        self._is_begun = False
        self._first: asyncio.Future[Exception | None] = _future()
        self._later: deque[Callable[[], bytes]] = deque()
        self._making: asyncio.Task[None] | None = None
        self._finish_later: Callable[[], None] | None = None

    def add_piece(self, piece: ChoicePiece) -> None:
        usage = self._generation.usage if self._shape.shows_usage_so_far else None
        if self._making is None and not piece.prompt_logprobs:
            self.outlet.put(self._shape.frames(usage, piece))
            if not self._is_begun:
                self._begin(None)
            return
        self._later.append(partial(self._shape.frames, usage, piece))
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make_later())

    def finish(self, error: Exception | None) -> None:
        """Send the stream's end; after a failure, send one error frame and no [DONE]."""
        if self._making is not None:
            self._finish_later = partial(self.finish, error)
            return
        try:
            if error is None:
                self.outlet.put(self._shape.last_frames(self._generation))
            elif self._is_begun:
                self.outlet.put(self._shape.error_frames(self._generation, error))
        finally:  # Even if the reply's shape raises an error, the client must not wait forever.
            self._begin(error)
            self.outlet.end()

    async def begun(self) -> None:
        """Wait until there is a first piece.

        Raises:
            DistAclGraphError: the generation failed before its first piece.
        """
        if (error := await self._first) is not None:
            raise error

    async def _make_later(self) -> None:
        """Encode and send the frames in ``_later`` in order; an error ends the stream."""
        try:
            while self._later:
                self.outlet.put(await asyncio.to_thread(self._later.popleft()))
                self._begin(None)
        except Exception as e:
            self._finish_later = partial(self.finish, e)
        self._making = None
        if self._finish_later is not None:
            self._finish_later()

    def _begin(self, error: Exception | None) -> None:
        self._is_begun = True
        if not self._first.done():
            self._first.set_result(error)


class _Held(Response):
    """A response that owns its generation until the response has been sent."""

    def __init__(self, response: Response, held: contextlib.ExitStack) -> None:
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self.background = None
        self._response = response
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._response(scope, receive, send)


class _Stream(Response):
    """A stream that owns its generation: the end of the response also ends the generation."""

    media_type = "text/event-stream"

    def __init__(self, outlet: sse.Outlet, held: contextlib.ExitStack) -> None:
        # Do not call Response.__init__, which would set the header Content-Length.
        self.status_code = 200
        self.background = None
        self.init_headers(sse.HEADERS)
        self._outlet = outlet
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._outlet.send_to(scope, send)


def _future() -> asyncio.Future[Exception | None]:
    return asyncio.get_running_loop().create_future()
