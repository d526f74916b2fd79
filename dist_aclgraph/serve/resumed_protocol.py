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

from dist_aclgraph.serve.journal import Chance, Journal, read
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
        self._request_before = opening.request
        end = partial(self._let_go, number)
        self._left: Journal | None = Journal(opening.chance, entries, kept.journal, end)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._rest = RestTransport(transport, self._num_bytes)
        super().connection_made(self._rest)  # type: ignore[arg-type]  # all that is asked of one
        transport.pause_reading()  # what the client sends next comes behind the request

    def resume(self) -> None:
        """Read the request."""
        if not self.transport.is_closing():
            self.data_received(self._request_before)
            self._journal = self._left
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        if not self._rest.owes_nothing:
            self._abort("was told more than there is")
        super().on_response_complete()

    def _refuses(self) -> bool:
        return self._left is None and super()._refuses()

    def _open_journal(self, cycle: RequestResponseCycle, body: bytes, chance: Chance) -> Journal:
        if self._left is None:
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
    resumed: list[ResumedProtocol] = []
    left, keeper.left = keeper.left, {}
    for number, kept in left.items():
        with contextlib.ExitStack() as stack:
            stack.callback(keeper.end, number)
            connection = stack.enter_context(socket.socket(fileno=kept.connection))
            connection.setblocking(False)
            try:
                protocol = make(number=number, kept=kept)
                await loop.connect_accepted_socket(partial(_same, protocol), connection)
            except (OSError, ValueError) as e:
                os.close(kept.journal)
                log.warning("a request that another process has left ends: %s", e)
                continue
            stack.pop_all()
            resumed.append(protocol)
    let_in()
    for protocol in resumed:
        protocol.resume()
    if left:
        log.info("%d of %d requests of the process before go on", len(resumed), len(left))


def _same(protocol: ResumedProtocol) -> ResumedProtocol:
    return protocol
