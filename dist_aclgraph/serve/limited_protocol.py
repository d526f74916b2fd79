"""LimitedProtocol: one connection of uvicorn's, with limits on what its client may do.

uvicorn leaves it to a proxy in front to bound headers, slow senders and slow readers. Here nothing
stands in front.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.edge import REQUEST_ID, request_name
from dist_aclgraph.serve.errors import plain_error
from dist_aclgraph.serve.refusal import GatedApp, Refusal
from dist_aclgraph.serve.sse import WRITE

log = logging.getLogger(__name__)
CLOSE = {"Connection": "close"}
CLOSE_HEADER = (b"connection", b"close")


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Owns the timer of what its client owes: headers, a body, or reading.

    Args:
        crowded: what every connection beyond ``serve.max_connections`` is told.
    """

    def __init__(
        self,
        *,
        app: GatedApp,
        limits: ServeConfig,
        crowded: Refusal,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._gate = app
        self._limits = limits
        self._crowded = crowded
        self._is_crowded = False
        self._is_refused = False  # the request whose body is being read has its answer
        self._due_s: float | None = None  # when the client must have sent what it owes
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it rings, which may be earlier
        self._unread: asyncio.TimerHandle | None = None
        self._in_headers = False
        # Bytes since a request, a chunk or a piece of a body began: of headers, of a chunk's
        # extension, or of trailers, which the parser keeps.
        self._num_header_bytes = 0
        self._has_begun = False  # one of these, with the bytes that are being parsed

    # -- transport -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_crowded = len(self.connections) > self._limits.max_connections
        self._owe(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pay()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        super().data_received(data)
        self._num_header_bytes = 0 if self._has_begun else self._num_header_bytes + len(data)
        if self._num_header_bytes > self._limits.max_header_bytes:
            self.transport.close()  # there is no whole request that could be answered
        # Any byte ends uvicorn's keep-alive timer, also one that begins no request: an empty line,
        # or the end of a body whose request has its answer.
        if self._due_s is None and self._is_quiet:
            self._owe(self._limits.header_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.stall_s, self._abort, "does not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # -- parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._has_begun = True
        self._owe(self._limits.header_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers of a body are none
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        # Reading a body ends with a 408 a little earlier, where somebody reads it.
        self._owe(self._limits.body_s + self._limits.header_s)
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self.app = plain_error(
                431, f"the headers exceed {self._limits.max_header_bytes} bytes", CLOSE
            )
        elif self._has_answered_all() and self._refuses():
            return
        super().on_headers_complete()
        scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
        scope["extensions"] = {WRITE: functools.partial(self._write, self.cycle)}

    def on_chunk_header(self) -> None:
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        self._has_begun = True
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self._is_refused = False
            self._owe(self._limits.header_s)  # another request may follow
            return
        if self.cycle.response_complete:
            self.cycle.more_body = False  # uvicorn leaves it as it is
        super().on_message_complete()
        self._pay()

    @property
    def _is_quiet(self) -> bool:
        """Whether no request is under way, but for what has not been sent."""
        cycle = self.cycle
        is_over = cycle is None or (cycle.response_complete and not cycle.more_body)
        return is_over and not (self.pipeline or self._in_headers or self._is_refused)

    # -- streams ---------------------------------------------------------------------------------

    def _write(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Write a part of a response's body at once; see ``sse.py``."""
        if self.flow.write_paused or cycle.disconnected or self.transport.is_closing():
            return False
        if not cycle.chunked_encoding or cycle.response_complete:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    # -- refusals --------------------------------------------------------------------------------

    def _has_answered_all(self) -> bool:
        """Whether an answer would be the next on this connection, and somebody reads it."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.flow.write_paused and not self.transport.is_closing()

    def _refuses(self) -> bool:
        """Answer at once if the gate refuses the request; say whether it does."""
        refusal = self._crowded
        if not self._is_crowded:
            found = self._gate.refusal(self.parser.get_method(), self.url)
            if found is None:
                return False
            refusal = found
        given = next((value for name, value in self.headers if name == REQUEST_ID), b"")
        headers = [*self.server_state.default_headers, (REQUEST_ID, request_name(given))]
        # Who waits for our leave to send a body gets none, and then does not send it.
        keeps_alive = (
            not self._is_crowded
            and not self.expect_100_continue
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
        )
        if not keeps_alive:
            headers.append(CLOSE_HEADER)
        self.transport.write(refusal.with_headers(headers))
        if not keeps_alive:
            self.transport.close()
        self._is_refused = True
        return True

    # -- timers ----------------------------------------------------------------------------------

    def _owe(self, seconds: float) -> None:
        """Give the client so much time. A timer that rings too early is wound up again then."""
        self._due_s = self.loop.time() + seconds
        if self._timer is None or self._due_s < self._timer_s:
            self._wind_up(self._due_s)

    def _pay(self) -> None:
        self._due_s = None

    def _wind_up(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = self.loop.call_at(at_s, self._ring), at_s

    def _ring(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._due_s > self._timer_s:
            self._wind_up(self._due_s)
        else:
            self._abort("sends too slowly")

    def _abort(self, why: str) -> None:
        log.info("a connection of %s was closed: it %s", self.client, why)
        self.transport.abort()
