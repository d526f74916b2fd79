"""HttpServer: a listening socket, served by uvicorn in a thread, with limits on every connection.

uvicorn leaves it to a proxy in front to bound headers, slow senders and slow readers. Here nothing
stands in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.edge import REQUEST_ID, request_name
from dist_aclgraph.serve.errors import RETRY_AFTER_S, plain_error
from dist_aclgraph.serve.refusal import GatedApp, Refusal
from dist_aclgraph.serve.sse import WRITE

log = logging.getLogger(__name__)
CLOSE = {"Connection": "close"}
CLOSE_HEADER = (b"connection", b"close")
FILES_BESIDE_CONNECTIONS = 512  # descriptors for all else that this process opens
SEND_BUFFER_BYTES = 64 << 10  # of each connection; by itself it grows to megabytes
BACKLOG = 4096  # connections that wait to be accepted; beyond, clients try again after a second
BEAT_S = 1  # between two signs of life
STOP_S = 5.0  # for replies that are on their way when the server is stopped


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Owns the timer of what its client owes: headers, a body, or reading.

    Args:
        crowded: what every connection beyond ``serve.max_connections`` is told.
    """

    def __init__(
        self, *, app: GatedApp, limits: ServeConfig, crowded: Refusal, **uvicorns: Any
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
        self._num_header_bytes = 0

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
        began_before = self._in_headers
        super().data_received(data)
        if self._in_headers and began_before:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes:
                self.transport.close()  # there is no request yet that could be answered

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
        self._in_headers, self._num_header_bytes = True, 0
        self._owe(self._limits.header_s)

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

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self._is_refused = False
            self._owe(self._limits.header_s)  # another request may follow
            return
        super().on_message_complete()
        self._pay()

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


class HttpServer:
    """Owns a thread between start and stop, and closes the socket that it serves.

    Args:
        listener: of ``listen``; connections wait there until ``start``.
        beat: called every second or two, from the event loop.
    """

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = config
        self._socket = listener
        self._beat = beat
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self, app: GatedApp) -> None:
        """Answer requests from now on."""
        _allow_files(self._limits.max_connections + FILES_BESIDE_CONNECTIONS)
        self._server = make_server(app, self._limits, self._beat)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port; replies that are on their way get a few seconds. Idempotent."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * STOP_S)
            self._server.force_exit = True
            self._thread.join(STOP_S)
        with contextlib.suppress(OSError):
            self._socket.close()


def make_server(
    app: GatedApp, limits: ServeConfig, beat: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """Return a server for sockets of ``listen``; ``beat`` as for ``HttpServer``."""

    async def notify() -> None:
        beat()

    crowded = plain_error(
        503,
        f"{limits.max_connections} connections are open; try again later",
        {"Retry-After": str(RETRY_AFTER_S)},
    )
    protocol: Callable[..., asyncio.Protocol] = functools.partial(
        LimitedProtocol, app=app, limits=limits, crowded=Refusal(crowded)
    )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol,  # type: ignore[arg-type]  # what makes one serves as its class
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(STOP_S),
            callback_notify=notify,
            timeout_notify=BEAT_S,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as e:
        raise ConfigError(
            f"serve.port is {port}: {host}:{port} cannot be bound ({e.strerror}); "
            "choose another with serve.port=N"
        ) from e
    listener.setblocking(False)
    return listener


def _allow_files(wanted: int) -> None:
    """Raise this process's own limit of open files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
