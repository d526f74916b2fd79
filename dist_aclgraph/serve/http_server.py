"""HttpServer: a listening socket, served by uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.errors import RETRY_AFTER_S, plain_error
from dist_aclgraph.serve.inlet import Inlet
from dist_aclgraph.serve.kept import Keeper
from dist_aclgraph.serve.kept_protocol import KeptProtocol
from dist_aclgraph.serve.open_files import allow_connections
from dist_aclgraph.serve.refusal import GatedApp, Refusal
from dist_aclgraph.serve.resumed_protocol import ResumedProtocol, Succession

SEND_BUFFER_BYTES = 64 << 10  # of each connection; by itself it grows to megabytes
BACKLOG = 4096  # connections that wait to be accepted; beyond, clients try again after a second
BEAT_S = 1  # between two signs of life
START_LOOK_S = 0.005
STOP_S = 5.0  # for replies that are on their way when the server is stopped


class HttpServer:
    """Owns a thread between start and stop, and closes the socket that it serves.

    Args:
        listener: of ``listen``; connections wait there until ``start``.
        beat: called every second or two, from the event loop.
        keeper: keeps connections on which an answer is under way beyond this process.
    """

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        beat: Callable[[], None] = lambda: None,
        keeper: Keeper | None = None,
    ) -> None:
        self._limits = config
        self._socket = listener
        self._beat = beat
        self._keeper = keeper or Keeper()
        self._server: uvicorn.Server | None = None
        self._succession: Succession | None = None
        self._thread: threading.Thread | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._taken = asyncio.Event()  # all that another process has left

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self, app: GatedApp) -> None:
        """Answer requests from now on, also on connections that another process has left."""
        self._keeper.max_kept = allow_connections(self._limits.max_connections)
        self._server = make_server(app, self._limits, self._beat, self._keeper)
        make = functools.partial(
            ResumedProtocol,
            **_of_connections(app, self._limits, self._keeper),
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )
        self._succession = Succession(self._keeper, make)
        self._thread = threading.Thread(
            target=self._run, args=[self._server], name="http", daemon=True
        )
        self._thread.start()

    def let_in(self, opens: Callable[[], None]) -> None:
        """Have ``opens`` let new requests in, and go on with answers that another process has
        promised.

        Args:
            opens: called on the event loop. The application answers from then on.
        """

        async def let_in() -> None:
            assert self._succession is not None
            await self._taken.wait()
            self._succession.finish(opens)

        asyncio.run_coroutine_threadsafe(let_in(), self._loop.result()).result()

    def _run(self, server: uvicorn.Server) -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            self._loop.set_result(runner.get_loop())
            runner.run(self._serve(server))

    async def _serve(self, server: uvicorn.Server) -> None:
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_over(server))
            await server.serve([self._socket])
            taking.cancel()

    async def _take_over(self, server: uvicorn.Server) -> None:
        assert self._succession is not None
        while not server.started:  # until then responses lack a header
            await asyncio.sleep(START_LOOK_S)
        await self._succession.begin()
        self._taken.set()

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
    app: GatedApp,
    limits: ServeConfig,
    beat: Callable[[], None] = lambda: None,
    keeper: Keeper | None = None,
) -> uvicorn.Server:
    """Return a server for sockets of ``listen``; ``beat`` and ``keeper`` as for ``HttpServer``."""
    keeper = keeper or Keeper()

    async def notify() -> None:
        beat()
        keeper.flush()

    of_connections = _of_connections(app, limits, keeper)

    def make(**uvicorns: Any) -> Inlet:
        return Inlet(keeper.intake, KeptProtocol(**of_connections, **uvicorns))

    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=make,  # type: ignore[arg-type]  # what makes one serves as its class
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


def _of_connections(app: GatedApp, limits: ServeConfig, keeper: Keeper) -> dict[str, Any]:
    """Return what each connection must know beside what uvicorn tells it."""
    crowded = plain_error(
        503,
        f"{limits.max_connections} connections are open; try again later",
        {"Retry-After": str(RETRY_AFTER_S)},
    )
    return {"app": app, "limits": limits, "crowded": Refusal(crowded), "keeper": keeper}


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
            # Connections inherit both. "Urgent" data (RFC 6093) is data like all other, else what
            # waits to be read could not be counted (``sent_bytes.py``).
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
