"""Sends server-sent events, one frame per chunk, to the client as soon as a frame exists.

Our server offers ``WRITE`` in the extensions of a request's scope. ``WRITE`` is a function that
writes a part of the response's body at once, without waking a task. It returns whether the
connection accepted the part. If the connection did not accept a part, the response's task sends the
part with ASGI's ``send``. On other servers, ``send`` sends all frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Scope, Send

from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.serve.openai.errors import error_body

log = logging.getLogger(__name__)
WRITE = "dist_aclgraph.write"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Write = Callable[[bytes], bool]


def frame(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_frame(name: str, body: Any) -> bytes:
    """Return the frame of an event that has a name."""
    return b"event: " + name.encode() + b"\n" + frame(body)


def error_frame(error: Exception) -> bytes:
    """Return the frame that a client gets in place of [DONE]."""
    log_failure(error)
    return frame(error_body(error))


def log_failure(error: Exception) -> None:
    """Log why a stream has failed, if the reason is a bug in our code."""
    if not isinstance(error, DistAclGraphError):
        log.error("a stream failed", exc_info=error)


class Outlet:
    """Sends the frames of one response in order. Only the event loop's thread may use
    this object.

    Each call of ``put`` adds exactly one part to the body. The part is written at once or sent
    later. Therefore timing does not change the bytes that the client receives. Another process can
    compute the same bytes and continue the response (``journal.py``).
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._write: Write | None = None  # None while earlier frames wait to be sent
        self._is_over = False
        self._wakes: asyncio.Future[None] | None = None

    def put(self, frames: bytes) -> None:
        if self._write is None or not self._write(frames):
            self._write = None
            self._waiting.append(frames)
            self._wake()

    def end(self) -> None:
        """Record that no more frames will follow."""
        self._is_over = True
        self._wake()

    async def send_to(self, scope: Scope, send: Send) -> None:
        """Send the response's body until its end. The response's head must have been sent."""
        write: Write | None = scope.get("extensions", {}).get(WRITE)
        while True:
            if self._waiting:
                frames = self._waiting.popleft()
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            elif self._is_over:
                break
            else:
                self._write = write
                self._wakes = asyncio.get_running_loop().create_future()
                await self._wakes
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _wake(self) -> None:
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)
