"""The HTTP server: an event loop, on its own thread, serves a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from email.utils import formatdate

import uvloop

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.http.connection import HttpConnection, ServerState
from dist_aclgraph.serve.http.exchange import CLOSE
from dist_aclgraph.serve.http.open_files import allow_connections
from dist_aclgraph.serve.http.refusal import GatedApp, Refusal
from dist_aclgraph.serve.openai.errors import RETRY_AFTER_S, plain_error
from dist_aclgraph.serve.resume.counters import hang_up
from dist_aclgraph.serve.resume.holder import HeldConnection, HolderLink
from dist_aclgraph.serve.resume.record import ConnectionRecord

log = logging.getLogger(__name__)
# Size of the kernel's send buffer of a connection; by default, a buffer grows to megabytes.
SEND_BUFFER_BYTES = 64 << 10
# Maximum number of connections that wait to be accepted. Further clients retry after a second.
BACKLOG = 4096
BEAT_S = 1.0  # seconds between two heartbeats, and between two updates of the date
LOOK_S = 0.05
# Maximum number of new connections before the event loop serves the open connections again.
ACCEPTED_A_TURN = 64
ACCEPT_PAUSE_S = 1.0  # seconds to the next attempt if a connection cannot be accepted
STOP_S = 5.0  # seconds to wait for unfinished replies when the server is stopped


class HttpServer:
    """Owns a thread between ``start`` and ``stop``. Owns and closes the listening socket.

    Args:
        listener: a socket from ``listen``; connections wait in it until ``start``.
        beat: a function that the event loop calls every second.
        link: link to the process that holds connections while another process replaces this
            process; None if the connections end with this process.
    """

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        beat: Callable[[], None] = lambda: None,
        link: HolderLink | None = None,
    ) -> None:
        self._limits = config
        self._socket = listener
        self._beat = beat
        # The kernel does not count the bytes of Unix sockets. Without counts, no process can
        # continue a connection.
        self._link = None if listener.family == socket.AF_UNIX else link
        self._next = ConnectionRecord(self._link)  # prepared for the next connection
        # Connections with requests that a previous process accepted and did not answer.
        self._owed: list[HttpConnection] = []
        self._thread: threading.Thread | None = None
        self._listening: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; waits until the server listens."""
        return self._listening.result()

    def start(self, app: GatedApp) -> None:
        """Begin to answer requests, on new connections and on the open connections of a previous
        process.
        """
        max_open, max_kept = allow_connections(self._limits.max_connections)
        self._limits = self._limits.model_copy(update={"max_connections": max_open})
        if self._link is not None:
            self._link.max_held = max_kept
        self._thread = threading.Thread(target=self._run, args=[app], name="http", daemon=True)
        self._thread.start()

    def let_in(self, opens: Callable[[], None]) -> None:
        """Continue the responses that a previous process has begun, and admit new requests.

        Args:
            opens: a function that opens the application. The event loop calls it.
        """

        async def let_in() -> None:
            opens()
            owed, self._owed = self._owed, []
            for connection in owed:
                connection.resume()

        asyncio.run_coroutine_threadsafe(let_in(), self.loop).result()

    def stop(self) -> None:
        """Close the port, and wait a few seconds for unfinished replies. Idempotent."""
        if self._thread is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(2 * STOP_S)
        with contextlib.suppress(OSError):
            self._socket.close()

    # -- on the event loop -----------------------------------------------------------------------

    def _run(self, app: GatedApp) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(app))
        except BaseException as e:
            if not self._listening.done():
                self._listening.set_exception(e)
            raise

    async def _serve(self, app: GatedApp) -> None:
        loop = asyncio.get_running_loop()
        state = _make_state(app, self._limits, self._link)
        await self._take_over(state)
        self._accept_from_now(state)
        self._listening.set_result(loop)
        while not self._stopping.is_set():
            state.headers[:] = _headers()
            self._beat()
            if self._link is not None:
                self._link.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), BEAT_S)
        loop.remove_reader(self._socket)
        self._socket.close()
        self._next.close()
        await _drain(state)

    def _accept_from_now(self, state: ServerState) -> None:
        if not self._stopping.is_set():
            asyncio.get_running_loop().add_reader(self._socket, self._accept, state)

    def _accept(self, state: ServerState) -> None:
        """Accept the connections that wait in the socket.

        The supervisor gets each connection's descriptor immediately after the acceptance. uvloop's
        own server would run other callbacks between the acceptance and ``connection_made``. If the
        process were killed during these callbacks, the connection would end.
        """
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_A_TURN):
            self._next.prepare()
            try:
                own, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:  # no descriptor or no memory is left
                log.warning("no connection is accepted for %g s: %s", ACCEPT_PAUSE_S, e)
                loop.remove_reader(self._socket)
                loop.call_later(ACCEPT_PAUSE_S, self._accept_from_now, state)
                return
            record = self._next
            if len(state.connections) < self._limits.max_connections:
                record.hold(own.fileno())
            self._next = ConnectionRecord(self._link)
            own.setblocking(False)
            opening = loop.create_task(_open(HttpConnection(state, record), own))
            state.tasks.add(opening)
            opening.add_done_callback(state.tasks.discard)

    async def _take_over(self, state: ServerState) -> None:
        """Continue the open connections of a previous process."""
        if self._link is None:
            return
        left, self._link.left = self._link.left, {}
        found = [await self._take(state, self._link, *each) for each in left.items()]
        taken = [connection for connection in found if connection is not None]
        for connection in taken:
            if connection.record.is_owed:
                self._owed.append(connection)
            else:
                connection.resume()
        if left:
            log.info("%d of %d connections of the previous process go on", len(taken), len(left))

    async def _take(
        self, state: ServerState, link: HolderLink, number: int, held: HeldConnection
    ) -> HttpConnection | None:
        own = socket.socket(fileno=held.connection)
        own.setblocking(False)
        try:
            record = ConnectionRecord.take_over(link, number, held)
            connection = HttpConnection(state, record, is_resumed=True)
            return connection if await _open(connection, own) else None
        except (OSError, ValueError) as e:
            log.warning("a connection of the previous process cannot go on: %s", e)
            hang_up(held.connection)
            own.close()
            return None
        finally:
            os.close(held.journal)


async def _open(connection: HttpConnection, own: socket.socket) -> bool:
    """Serve an accepted connection; return False if it has ended meanwhile."""
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_accepted_socket(lambda: connection, own)
    except OSError:
        connection.record.close()
        hang_up(own.fileno())
        own.close()
        return False
    return True


def _make_state(app: GatedApp, limits: ServeConfig, link: HolderLink | None) -> ServerState:
    crowded = plain_error(
        503,
        f"{limits.max_connections} connections are open; try again later",
        {"Retry-After": str(RETRY_AFTER_S)},
    )
    malformed = plain_error(400, "this is no HTTP request", CLOSE)
    return ServerState(app, limits, Refusal(crowded), Refusal(malformed), link, _headers())


def _headers() -> list[tuple[bytes, bytes]]:
    """Return the headers that the server adds to every response."""
    return [(b"date", formatdate(usegmt=True).encode())]


async def _drain(state: ServerState) -> None:
    """Wait some seconds until unfinished replies have ended, then end all connections."""
    until_s = asyncio.get_running_loop().time() + STOP_S
    for connection in list(state.connections):
        connection.shut_down()
    while (state.connections or state.tasks) and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(LOOK_S)
    for connection in list(state.connections):
        connection.transport.abort()
    for task in list(state.tasks):
        task.cancel()
    await asyncio.sleep(0)  # lets the event loop run the callbacks that end connections


def listen_at(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at the address in the configuration.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if config.uds is None:
        return listen(config.host, config.port)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_unused(config.uds)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(config.uds)
        os.chmod(config.uds, 0o660)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"serve.uds is {config.uds}: it cannot be bound ({e.strerror or e}); choose another"
        ) from e
    listener.setblocking(False)
    return listener


def _remove_unused(path: str) -> None:
    """Remove the socket file of a service that has ended; the file of a running service stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        except OSError:
            pass  # there is no socket file


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this host and port.

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
            # Accepted connections inherit the next two options. SO_OOBINLINE treats "urgent" data
            # (RFC 6093) like other data; otherwise unread bytes could not be counted
            # (``counters.py``).
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
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
