"""One HTTP request and its response, in the form that ASGI gives to an application."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from dist_aclgraph.serve.http.refusal import header_lines, status_line
from dist_aclgraph.serve.openai.errors import plain_error
from dist_aclgraph.serve.resume.record import CONTINUE

if TYPE_CHECKING:
    from dist_aclgraph.serve.http.connection import HttpConnection

log = logging.getLogger(__name__)
HIGH_WATER_BYTES = 64 << 10  # maximum number of unread bytes of a request body
CLOSE = {"Connection": "close"}
CLOSE_HEADER = (b"connection", b"close")
CHUNKED_HEADER = (b"transfer-encoding", b"chunked")
WITHOUT_BODY = (204, 304)  # statuses of responses without a body


class HttpExchange:
    """One request and its response. The response's head and first part are written together.

    Attributes:
        has_more: whether a part of the request's body has not arrived yet.
        is_complete: whether the whole response has been written.
        keeps_alive: whether another request may follow on the connection.
        expects_continue: whether the client waits for "100 Continue" before it sends the body.
    """

    def __init__(
        self, connection: HttpConnection, app: ASGIApp, scope: Scope, *, keeps_alive: bool
    ) -> None:
        self.scope = scope
        self.has_more = True
        self.is_complete = False
        self.keeps_alive = keeps_alive
        self.expects_continue = False
        self._connection = connection
        self._app = app
        self._body = bytearray()
        self._has_news = asyncio.Event()  # set when ``receive`` can return something
        self._is_disconnected = False
        self._head: bytes | None = None  # the response's head, until it is written
        self._has_begun = False  # whether the head has been written
        self._is_chunked = False

    # -- for the connection ----------------------------------------------------------------------

    def take_body(self, data: bytes) -> None:
        if not self.is_complete:
            self._body += data
            if len(self._body) > HIGH_WATER_BYTES:
                self._connection.transport.pause_reading()
            self._has_news.set()

    def end_body(self) -> None:
        self.has_more = False
        self._has_news.set()

    def disconnect(self) -> None:
        """Record that the connection has ended."""
        self._is_disconnected = not self.is_complete
        self._has_news.set()

    async def run(self) -> None:
        try:
            await self._app(self.scope, self.receive, self.send)
            if not (self.is_complete or self._is_disconnected):
                raise RuntimeError("the application has not completed its response")
        except Exception:
            log.exception("a request could not be answered")
            if self._has_begun or self._is_disconnected:
                self._connection.transport.close()
            else:
                await plain_error(500, "internal server error", CLOSE)(
                    self.scope, self.receive, self.send
                )

    # -- for the application ---------------------------------------------------------------------

    async def receive(self) -> Message:
        connection = self._connection
        if self.expects_continue and not connection.transport.is_closing():
            self.expects_continue = False
            connection.write(CONTINUE)
        if not (self._is_disconnected or self.is_complete):
            connection.transport.resume_reading()
            await self._has_news.wait()
            self._has_news.clear()
        if self._is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.has_more}

    async def send(self, message: Message) -> None:
        if not self._connection.is_writable.is_set():
            await self._connection.is_writable.wait()
        if self._is_disconnected:
            return
        if message["type"] == "http.response.start":
            if message["status"] != 200 and self._connection.record.num_omitted:
                # A request whose response has begun cannot be refused.
                self._connection.transport.abort()
            self._head = self._make_head(message["status"], message.get("headers", ()))
            return
        if self.is_complete or (self._head is None and not self._has_begun):
            raise RuntimeError(
                "a part of a body came before the head of its response, or after its end"
            )
        body, has_more = message.get("body", b""), message.get("more_body", False)
        parts = []
        if self._head is not None:
            parts, self._head, self._has_begun = [self._head], None, True
        if self.scope["method"] == "HEAD":
            pass
        elif not self._is_chunked:
            parts.append(body)
        else:
            if body:
                parts.append(b"%x\r\n%b\r\n" % (len(body), body))
            if not has_more:
                parts.append(b"0\r\n\r\n")
        self._connection.write(b"".join(parts))
        if not has_more:
            self.is_complete = True
            self._has_news.set()
            self._connection.end_response()

    def write(self, body: bytes) -> bool:
        """Write a part of the body without waiting; return whether it was written. See
        ``sse.py``.
        """
        if not self._has_begun or not self._is_chunked or self.is_complete:
            return False
        if self._is_disconnected or not self._connection.takes_more:
            return False
        self._connection.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _make_head(self, status: int, headers: Any) -> bytes:
        self.expects_continue = False
        headers = [*self._connection.server.headers, *headers]
        found = {name.lower(): value for name, value in headers}
        if b"close" in found.get(b"connection", b"").lower():
            self.keeps_alive = False
        elif not self.keeps_alive:
            headers.append(CLOSE_HEADER)
        # In HTTP/1.0, the end of the connection marks the end of a body without Content-Length.
        self._is_chunked = (
            b"content-length" not in found
            and status not in WITHOUT_BODY
            and self.scope["http_version"] != "1.0"
        )
        if self._is_chunked and self.scope["method"] != "HEAD":
            headers.append(CHUNKED_HEADER)
        return status_line(status) + header_lines(headers) + b"\r\n"
