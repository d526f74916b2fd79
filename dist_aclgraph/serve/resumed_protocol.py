"""Connections of a process that has died: what had come of a request is read again, and what has
been sent of its response is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from dist_aclgraph.serve.inlet import Inlet
from dist_aclgraph.serve.journal import RESUMED, Chance, Journal, JournalFile
from dist_aclgraph.serve.kept import Keeper, Kept
from dist_aclgraph.serve.kept_protocol import KeptProtocol, Phase
from dist_aclgraph.serve.sent_bytes import RestTransport, num_sent_bytes

log = logging.getLogger(__name__)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # as uvicorn writes it


class ResumedProtocol(KeptProtocol):
    """A connection that was kept. Later requests on it are like all others.

    Raises:
        OSError, ValueError: nothing can go on.
    """

    def __init__(self, *, number: int, kept: Kept, **limits: Any) -> None:
        super().__init__(**limits)
        known = kept.known()
        self._num_bytes = 0  # of the response, that have been sent
        self._may_send = False  # the client has been told to send its body
        if known.request:
            self._num_bytes = num_sent_bytes(kept.connection) - known.num_sent
            if known.chance is None and self._num_bytes == len(CONTINUE):
                self._num_bytes, self._may_send = 0, True
        if self._num_bytes < 0:
            raise ValueError("a part of the response before was lost")
        if self._num_bytes and known.chance is None:
            raise ValueError("a response has begun of which nothing is known")
        self._request_before = known.request
        self._early = b""  # what came before anybody could answer it
        self._is_resumed = False
        self._first: RequestResponseCycle | None = None  # that of a request that was accepted
        self._left: Journal | None = None  # its journal, until somebody has opened it
        self.number, self._file = number, JournalFile(kept.journal)
        if known.request:
            self._phase = Phase.ARRIVING
        if known.chance is not None:
            self._phase = Phase.ANSWERING
            self._journal = self._left = Journal(
                known.chance, known.entries, is_resumed=True, file=self._file, on_end=self._let_go
            )

    @property
    def is_owed(self) -> bool:
        """Whether an answer has been promised."""
        return self._left is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._rest = RestTransport(transport, self._num_bytes)
        super().connection_made(self._rest)  # type: ignore[arg-type]  # all that is asked of one
        if self.is_owed:
            self._pay()  # the client owes nothing

    def resume(self) -> None:
        """Read what had come of a request, then what has come behind it."""
        if self.transport.is_closing():
            return
        self._is_resumed = True
        if self._request_before:
            self._read(self._request_before)
        if self._left is not None:
            self._first = self.cycle
        if self.cycle is not None and (self.is_owed or self._may_send):
            self.cycle.waiting_for_100_continue = False
        if self._early:
            self.flow.resume_reading()
            self._read(self._early)

    def data_received(self, data: bytes) -> None:
        if self._is_resumed:
            super().data_received(data)
        else:
            self._note(data)
            self._early += data
            self.flow.pause_reading()  # more can wait at the client

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._left is not None and self._first is None:
            scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
            scope["extensions"][RESUMED] = True

    def on_response_complete(self) -> None:
        if not self._rest.owes_nothing:
            self._abort("was told more than there is")
        if self._left is not None:  # it was refused before anybody asked for the journal
            journal, self._left = self._left, None
            journal.end()
        super().on_response_complete()

    def _keep(self) -> None:
        """It is kept."""

    def _refuses(self) -> bool:
        return self._left is None and super()._refuses()

    def _open_journal(self, cycle: RequestResponseCycle, chance: Chance) -> Journal:
        if self._left is None or cycle is not self._first:
            return super()._open_journal(cycle, chance)
        journal, self._left = self._left, None
        return journal


class Succession:
    """Goes on with what the process before has left.

    Args:
        make: a protocol, of a number and what is kept.
    """

    def __init__(self, keeper: Keeper, make: Callable[..., ResumedProtocol]) -> None:
        self._keeper = keeper
        self._make = make
        self._owed: list[ResumedProtocol] = []

    async def begin(self) -> None:
        """Take all connections over. Those to which no answer has been promised are like new ones;
        the others wait for ``finish``.
        """
        left, self._keeper.left = self._keeper.left, {}
        found = await asyncio.gather(*(self._take(*each) for each in left.items()))
        taken = [protocol for protocol in found if protocol is not None]
        self._owed = [protocol for protocol in taken if protocol.is_owed]
        for protocol in taken:
            if not protocol.is_owed:
                protocol.resume()
        if left:
            log.info("%d of %d connections of the process before go on", len(taken), len(left))

    def finish(self, let_in: Callable[[], None]) -> None:
        """Go on with the answers that have been promised.

        Args:
            let_in: lets new requests in, which come behind those.
        """
        let_in()
        owed, self._owed = self._owed, []
        for protocol in owed:
            protocol.resume()

    async def _take(self, number: int, kept: Kept) -> ResumedProtocol | None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._keeper.end, number)
            connection = stack.enter_context(socket.socket(fileno=kept.connection))
            try:
                connection.setblocking(False)
                protocol = self._make(number=number, kept=kept)
                inlet = Inlet(self._keeper.intake, protocol)
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: inlet, connection)
            except (OSError, ValueError) as e:
                os.close(kept.journal)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # it is held elsewhere, too
                log.warning("a connection that another process has left ends: %s", e)
                return None
            stack.pop_all()
            return protocol
