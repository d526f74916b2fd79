"""One client's connection, which limits the bytes that a client may send, and the time in which the
client must send them.

No proxy protects the server, so the connection itself limits headers, slow senders and slow
readers. A ``ConnectionRecord`` stores everything that another process needs to continue the
connection.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Scope

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.http.deadline import ClientDeadline
from dist_aclgraph.serve.http.edge import REQUEST_ID, request_name
from dist_aclgraph.serve.http.exchange import CLOSE, CLOSE_HEADER, HttpExchange
from dist_aclgraph.serve.http.refusal import GatedApp, Refusal
from dist_aclgraph.serve.openai.errors import plain_error
from dist_aclgraph.serve.openai.sse import WRITE
from dist_aclgraph.serve.resume.counters import hang_up
from dist_aclgraph.serve.resume.holder import HolderLink
from dist_aclgraph.serve.resume.journal import JOURNAL, RESUMED, Chance, Journal
from dist_aclgraph.serve.resume.record import ConnectionRecord

log = logging.getLogger(__name__)


@dataclass
class ServerState:
    """State that all connections of a server share.

    Attributes:
        crowded: the response that a client gets if ``serve.max_connections`` connections are
            already open.
        malformed: the response that a client gets if it sends bytes that are not HTTP.
        link: link to the process that holds connections while another process replaces this
            process; None if the connections end with this process.
        headers: headers of every response. The server updates the date.
        tasks: the tasks that open connections and answer requests.
    """

    app: GatedApp
    limits: ServeConfig
    crowded: Refusal
    malformed: Refusal
    link: HolderLink | None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. Owns its deadlines and its exchanges; handles one exchange after another.

    Args:
        record: the record of the connection.
        is_resumed: whether a previous process accepted the connection. If true, ``resume`` parses
            the bytes that the record contains.

    Attributes:
        is_writable: set while no bytes wait to be sent.
    """

    def __init__(
        self, server: ServerState, record: ConnectionRecord, *, is_resumed: bool = False
    ) -> None:
        self.server = server
        self.record = record
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        self._is_suspended = is_resumed
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._deadline = ClientDeadline(self._loop, self._end_overdue)
        # Ends the connection if the client does not read.
        self._stall: asyncio.TimerHandle | None = None
        self._is_crowded = False
        self._exchanges: deque[HttpExchange] = deque()  # the first exchange is being answered
        self._last: HttpExchange | None = None  # the exchange that began last
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_in_headers = False
        self._is_refused = False  # whether the request whose body is being read was refused
        # Number of bytes that have arrived since the last request, chunk or piece of a body began.
        # These bytes are headers, a chunk's extension, or trailers, which the parser keeps in
        # memory.
        self._num_header_bytes = 0
        self._has_begun = False  # whether the last bytes began a request, a chunk or a piece

    def resume(self) -> None:
        """Parse the bytes that the previous process has read, and start to read more bytes."""
        if not self.transport.is_closing():
            self._is_suspended = False
            self.transport.resume_reading()
            self._parse(self.record.all_read())

    def shut_down(self) -> None:
        """Close the connection after all requests that have arrived are answered."""
        for exchange in self._exchanges:
            exchange.keeps_alive = False
        if not self._exchanges:
            self.transport.close()

    # -- transport -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # with this limit, a single unsent byte causes pause_writing
        transport.set_write_buffer_limits(0)
        own = transport.get_extra_info("socket")
        self._descriptor = own.fileno()
        self._own_address, self._client = _address(own.getsockname), _address(own.getpeername)
        self.server.connections.add(self)
        self._is_crowded = len(self.server.connections) > self._limits.max_connections
        if not self._is_crowded:
            self.record.hold(self._descriptor)
        if not self.record.is_owed:
            self._deadline.set(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._deadline.close()
        self.resume_writing()
        for exchange in self._exchanges:
            exchange.disconnect()
        hang_up(self._descriptor)
        self.record.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.record.read_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        data = self.record.take_read(nbytes)
        if not self._is_suspended:
            self._parse(data)
        elif self.record.is_held:
            self.transport.pause_reading()  # later bytes stay in the kernel and at the client
        else:
            self._abort("sends too much")

    def pause_writing(self) -> None:
        self.is_writable.clear()
        self._stall = self._loop.call_later(self._limits.stall_s, self._abort, "does not read")

    def resume_writing(self) -> None:
        self.is_writable.set()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._settle()

    # -- exchanges -------------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        """Whether the connection is open and no bytes wait to be sent."""
        return self.is_writable.is_set() and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        self.transport.write(self.record.take_unsent(data))

    def end_response(self) -> None:
        """Remove the first exchange, which is complete, and start the next exchange."""
        exchange = self._exchanges.popleft()
        if self.record.num_omitted:
            self._abort("was told more than there is")
        self.record.spend()
        if not exchange.keeps_alive:
            self.transport.close()
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        if self._exchanges:
            self._start(self._exchanges[0])
        elif self._is_quiet:
            self._deadline.set(self._limits.keep_alive_s)
        self._settle()

    def _start(self, exchange: HttpExchange) -> None:
        task = self._loop.create_task(exchange.run())
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def _open_journal(self, exchange: HttpExchange, chance: Chance) -> Journal:
        """Begin the journal of a request that was accepted."""
        is_alone = exchange is self._last and len(self._exchanges) == 1 and not self._is_in_headers
        is_alone = is_alone and not self.transport.is_closing()
        return self.record.open_journal(chance, is_alone=is_alone)

    @property
    def _is_quiet(self) -> bool:
        """True if no request is in progress, even if bytes of the last response wait to be sent."""
        has_more = self._last is not None and self._last.has_more
        return not (self._exchanges or has_more or self._is_in_headers or self._is_refused)

    def _settle(self) -> None:
        """Update the connection's record after a request has been answered."""
        if not self.record.is_spent or self.transport.is_closing():
            return  # the response ends only when the connection is closed
        if not self._is_quiet:
            self.record.void()
        elif self.is_writable.is_set():
            self.record.clear()

    # -- parser ----------------------------------------------------------------------------------

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # If a request asks to close the connection, the request stays valid even if the client
        # sends more data.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse(self, data: bytes) -> None:
        self._has_begun = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if self._has_answered_all:
                self.write(self.server.malformed.with_headers(self.server.headers))
            self.transport.close()
            return
        self._num_header_bytes = 0 if self._has_begun else self._num_header_bytes + len(data)
        if self._num_header_bytes > self._limits.max_header_bytes:
            self.transport.close()  # there is no complete request to answer
        if self._is_quiet:  # Bytes that do not begin a request must not keep the connection open.
            self._deadline.shorten(self._limits.header_s)
        self._settle()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as e:
                if self._wants_upgrade:
                    data = self._without_upgrade() + data[e.args[0] :]
                    continue
                # Bytes after CONNECT are not HTTP, and are not parsed. Earlier requests are still
                # answered.
            return

    @property
    def _wants_upgrade(self) -> bool:
        """Whether the headers ask for another protocol. Java's client asks for h2c in every request
        without TLS.
        """
        is_asked = any(name == b"upgrade" for name, _ in self._headers)
        return is_asked and self._parser.should_upgrade()

    def _without_upgrade(self) -> bytes:
        """Return the headers without the header Upgrade, for a new parser. The previous parser does
        not read the body of a request with the header Upgrade.
        """
        kept = (header for header in self._headers if header[0] != b"upgrade")
        lines = b"".join(b"%b: %b\r\n" % header for header in kept)
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        self._parser = self._new_parser()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, lines)

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._is_in_headers = self._has_begun = True
        self._deadline.set(self._limits.header_s)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # trailers of a body are ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        if self._wants_upgrade:
            return
        # An application that reads the body responds with 408 a little before this deadline.
        self._deadline.set(self._limits.body_s + self._limits.header_s)
        resumed = self.record.take_resumed()
        owed = resumed.journal if resumed is not None else None
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
        app: ASGIApp = self.server.app
        if size > self._limits.max_header_bytes:
            app = plain_error(
                431, f"the headers exceed {self._limits.max_header_bytes} bytes", CLOSE
            )
        elif not self._has_right_host:
            app = plain_error(400, "a request must have exactly one Host header", CLOSE)
        elif owed is None and self._has_answered_all and self._refuse():
            return
        version = self._parser.get_http_version()
        keeps_alive = version != "1.0" and self._parser.should_keep_alive()
        exchange = HttpExchange(self, app, self._make_scope(version), keeps_alive=keeps_alive)
        exchange.expects_continue = self._expects_continue and not (
            resumed is not None and resumed.may_send_body
        )
        extensions = exchange.scope["extensions"] = {WRITE: exchange.write}
        if owed is not None:
            extensions |= {RESUMED: True, JOURNAL: lambda _: owed}
        elif self.server.link is not None:
            extensions[JOURNAL] = partial(self._open_journal, exchange)
        self._last = exchange
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start(exchange)
        else:
            self.transport.pause_reading()

    def on_chunk_header(self) -> None:
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        self._has_begun = True
        if not self._is_refused and self._last is not None:
            self._last.take_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        if not self._is_refused and self._last is not None:
            self._last.end_body()
        self._is_refused = False
        if self._exchanges:
            self._deadline.clear()
        else:
            self._deadline.set(self._limits.keep_alive_s)

    @property
    def _has_right_host(self) -> bool:
        """Whether the request's Host headers obey RFC 9112, section 3.2."""
        count = sum(name == b"host" for name, _ in self._headers)
        return count == 1 or (count == 0 and self._parser.get_http_version() == "1.0")

    @property
    def _expects_continue(self) -> bool:
        return any(n == b"expect" and v.lower() == b"100-continue" for n, v in self._headers)

    def _make_scope(self, version: str) -> Scope:
        url = httptools.parse_url(self._url)
        path = (url.path or b"/").decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._own_address,
            "client": self._client,
            "scheme": "http",
            "root_path": "",
            "method": self._parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }

    # -- refusals --------------------------------------------------------------------------------

    @property
    def _has_answered_all(self) -> bool:
        """Whether a response can be written now, because all earlier responses are complete."""
        return not self._exchanges and self.takes_more

    def _refuse(self) -> bool:
        """Ask whether the application refuses the request; if so, send the refusal."""
        refusal: Refusal | None = self.server.crowded
        if not self._is_crowded:
            refusal = self.server.app.refusal(self._parser.get_method(), self._url)
        if refusal is None:
            return False
        given = next((value for name, value in self._headers if name == REQUEST_ID), b"")
        headers = [*self.server.headers, (REQUEST_ID, request_name(given))]
        # A client that waits for "100 Continue" gets the refusal instead, and sends no body.
        keeps_alive = (
            not self._is_crowded
            and not self._expects_continue
            and self._parser.get_http_version() == "1.1"
            and self._parser.should_keep_alive()
        )
        if not keeps_alive:
            headers.append(CLOSE_HEADER)
        self.write(refusal.with_headers(headers))
        self.record.spend()
        if not keeps_alive:
            self.transport.close()
        self._is_refused = True
        return True

    # -- ends ------------------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        if self._is_quiet:
            self.transport.close()
        else:
            self._abort("sends too slowly")

    def _abort(self, why: str) -> None:
        log.info("a connection of %s was closed: it %s", self._client, why)
        self.transport.abort()


def _address(ask: Callable[[], Any]) -> tuple[str, int] | None:
    """Return an address in ASGI's form; None for a Unix socket or a disconnected client."""
    try:
        address = ask()
    except OSError:
        return None
    if not isinstance(address, tuple):
        return None
    host, port, *_ = address
    return str(host), int(port)
