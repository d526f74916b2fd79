"""Connections on which another process has begun to answer: the request is read again, and what has
been sent of the response is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from dist_aclgraph.serve.journal import RESUMED, Chance, Journal, read
from dist_aclgraph.serve.kept import Keeper, Kept
from dist_aclgraph.serve.limited_protocol import LimitedProtocol
from dist_aclgraph.serve.sent_bytes import RestTransport, num_sent_bytes

log = logging.getLogger(__name__)


class ResumedProtocol(LimitedProtocol):
    """A connection that was kept. Later requests on it are like all others.

    Raises:
        OSError, ValueError: nothing can go on.
    """

    def __init__(self, *, number: int, kept: Kept, **limits: Any) -> None:
        super().__init__(**limits)
        opening, entries = read(kept.journal)
        self._num_bytes = num_sent_bytes(kept.connection) - opening.num_sent
        if self._num_bytes < 0:
            raise ValueError("a part of the response before was lost")
        self._request_before: bytes | None = opening.request  # until it is read
        self._early = b""  # what came before that
        self._first: RequestResponseCycle | None = None  # that of the request
        end = partial(self._let_go, number)
        self._journal = Journal(
            opening.chance, entries, is_resumed=True, file=kept.journal, on_end=end
        )
        self._left: Journal | None = self._journal  # until somebody has opened it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._rest = RestTransport(transport, self._num_bytes)
        super().connection_made(self._rest)  # type: ignore[arg-type]  # all that is asked of one
        self._pay()  # the client owes nothing

    def resume(self) -> None:
        """Read the request, then what has come behind it."""
        if self._request_before is None or self.transport.is_closing():
            return
        request, self._request_before = self._request_before, None
        journal, self._journal = self._journal, None
        super().data_received(request)
        self._first, self._journal = self.cycle, journal
        if self._early:
            super().data_received(self._early)

    def data_received(self, data: bytes) -> None:
        if self._request_before is not None:
            self._early += data
        else:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._first is None:
            scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
            scope["extensions"][RESUMED] = True

    def on_response_complete(self) -> None:
        if not self._rest.owes_nothing:
            self._abort("was told more than there is")
        if self._left is not None:  # it was refused before anybody asked for the journal
            journal, self._left = self._left, None
            journal.end()
        super().on_response_complete()

    def _refuses(self) -> bool:
        return self._left is None and super()._refuses()

    def _open_journal(self, cycle: RequestResponseCycle, body: bytes, chance: Chance) -> Journal:
        if self._left is None or cycle is not self._first:
            return super()._open_journal(cycle, body, chance)
        journal, self._left = self._left, None
        return journal


async def take_over(
    keeper: Keeper, make: Callable[..., ResumedProtocol], let_in: Callable[[], None]
) -> None:
    """Go on with all requests that the process before has left.

    Args:
        make: a protocol, of a number and what is kept.
        let_in: lets new requests in, which come behind those.
    """
    loop = asyncio.get_running_loop()
    left, keeper.left = keeper.left, {}

    async def take(number: int, kept: Kept) -> ResumedProtocol | None:
        with contextlib.ExitStack() as stack:
            stack.callback(keeper.end, number)
            try:
                connection = stack.enter_context(socket.socket(fileno=kept.connection))
                connection.setblocking(False)
                protocol = make(number=number, kept=kept)
                await loop.connect_accepted_socket(lambda: protocol, connection)
            except (OSError, ValueError) as e:
                os.close(kept.journal)
                log.warning("a request that another process has left ends: %s", e)
                return None
            stack.pop_all()
            return protocol

    taken = await asyncio.gather(*(take(number, kept) for number, kept in left.items()))
    resumed = [protocol for protocol in taken if protocol is not None]
    let_in()
    for protocol in resumed:
        protocol.resume()
    if left:
        log.info("%d of %d requests of the process before go on", len(resumed), len(left))
