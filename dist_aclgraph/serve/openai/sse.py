"""Server-sent events: one ``data:`` frame per chunk, out to a client as it comes.

A server may offer ``WRITE`` among the extensions of its scope, as ours does: a function that writes
a part of the response's body at once, and returns whether the connection took it. Such a write
wakes no task. Frames that the connection did not take are sent by the response's task through
ASGI's ``send``, as are all frames on other servers.
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


def error_frame(error: Exception) -> bytes:
    """Return what a client is told in place of [DONE]."""
    if not isinstance(error, DistAclGraphError):  # a bug of ours: the stream must not seem complete
        log.error("a stream failed", exc_info=error)
    return frame(error_body(error))


class Outlet:
    """The frames of one response, in order. For the event loop's thread alone.

    Each call of ``put`` makes one part of the body, however it is sent. So the bytes on the wire do
    not depend on timing, and another process can continue them (``journal.py``).
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._write: Write | None = None  # None while frames wait
        self._is_over = False
        self._wakes: asyncio.Future[None] | None = None

    def put(self, frames: bytes) -> None:
        if self._write is None or not self._write(frames):
            self._write = None
            self._waiting.append(frames)
            self._wake()

    def end(self) -> None:
        """Nothing comes after this."""
        self._is_over = True
        self._wake()

    async def send_to(self, scope: Scope, send: Send) -> None:
        """Send the response's body, to its end. The response must have begun."""
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
