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
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.errors import RETRY_AFTER_S, plain_error

log = logging.getLogger(__name__)
CLOSE = {"Connection": "close"}
FILES_BESIDE_CONNECTIONS = 512  # descriptors for all else that this process opens
SEND_BUFFER_BYTES = 64 << 10  # of each connection; by itself it grows to megabytes
STOP_S = 5.0  # for replies that are on their way when the server is stopped


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Owns the timer of what its client owes: headers, a body, or reading."""

    def __init__(self, *, limits: ServeConfig, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._owed: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._num_header_bytes = 0

    # -- transport -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        opened: socket.socket = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self.connections) > self._limits.max_connections:
            self.app = plain_error(
                503,
                f"{self._limits.max_connections} connections are open; try again later",
                {"Retry-After": str(RETRY_AFTER_S), **CLOSE},
            )
        self._owe(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pay()
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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._pay()

    # -- timers ----------------------------------------------------------------------------------

    def _owe(self, seconds: float) -> None:
        self._pay()
        self._owed = self.loop.call_later(seconds, self._abort, "sends too slowly")

    def _pay(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    def _abort(self, why: str) -> None:
        log.info("a connection of %s was closed: it %s", self.client, why)
        self.transport.abort()


class HttpServer:
    """Owns a listening socket from construction on, and a thread between start and stop."""

    def __init__(self, config: ServeConfig) -> None:
        """Bind and listen; connections wait until ``start``.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._limits = config
        self._socket = _listen(config.host, config.port)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self, app: ASGIApp) -> None:
        """Answer requests from now on."""
        _allow_files(self._limits.max_connections + FILES_BESIDE_CONNECTIONS)
        protocol: Callable[..., asyncio.Protocol] = functools.partial(
            LimitedProtocol, limits=self._limits
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # what makes one serves as its class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
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
