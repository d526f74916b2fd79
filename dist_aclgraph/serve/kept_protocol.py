"""KeptProtocol: one connection, which outlives this process with what is under way on it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from dist_aclgraph.serve.journal import JOURNAL, Arrival, Chance, Journal, JournalFile, Opening
from dist_aclgraph.serve.kept import Keeper
from dist_aclgraph.serve.limited_protocol import LimitedProtocol
from dist_aclgraph.serve.sent_bytes import num_read_bytes, num_sent_bytes

UNSENT_S = 0.05  # between two looks whether all has been sent


class Phase(Enum):
    """How far the journal of a connection is."""

    IDLE = "nothing is under way"
    ARRIVING = "what has come is written down, and nobody has accepted it"
    ANSWERING = "the request's own journal is written"
    SENDING = "all is written down, and not all is sent"
    UNKNOWN = "something has come or gone that is not written down"


class KeptProtocol(LimitedProtocol):
    """A connection with a journal. Owns its file, and what says which phase it is in.

    Args:
        keeper: keeps the connection beyond this process.
    """

    def __init__(self, *, keeper: Keeper, **limits: Any) -> None:
        super().__init__(**limits)
        self._keeper = keeper
        self.number: int | None = None  # by which the connection is kept; None while it is not
        self._file: JournalFile | None = None
        self._phase = Phase.IDLE
        self._journal: Journal | None = None  # of the request that is being answered
        self._num_looks = 0  # at what is not sent
        self._num_unnoted = 0  # bytes that have been read, and are written down next
        # Set while data is parsed, where a request has its answer before its body has ended.
        self._has_answered = False
        self._descriptor, self._inode = -1, 0

    # -- transport -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._inode = os.fstat(self._descriptor).st_ino
        self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._journal is not None:
            self._journal.end()
        self._hang_up()
        super().connection_lost(exc)
        if self.number is not None and self._file is not None:
            self._keeper.end(self.number)
            self._file.close()
            self.number = self._file = None

    def data_received(self, data: bytes) -> None:
        self._note(data)
        self._read(data)

    def _note(self, data: bytes) -> None:
        """Write bytes that have come into the journal, before anything is done with them."""
        self._num_unnoted = len(data)
        self._write_down(data)
        self._num_unnoted = 0

    def _read(self, data: bytes) -> None:
        """Parse bytes that are in the journal, or that nobody goes on with."""
        super().data_received(data)
        if self._has_answered:
            self._has_answered = False
            self._settle()

    # -- requests --------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self._is_refused:
            scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
            opens = functools.partial(self._open_journal, self.cycle)
            scope["extensions"][JOURNAL] = opens

    def on_message_complete(self) -> None:
        if self._is_refused or self.cycle.response_complete:
            self._has_answered = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._journal is None:
            self._settle()
        super().on_response_complete()

    # -- the journal -----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Have the connection kept, as far as there is room."""
        has_room = self._keeper.has_room and not self._is_crowded
        num_noted = self._num_noted() if has_room else None
        file = None if num_noted is None else JournalFile.make(num_noted)
        if file is None:
            return
        number = self._keeper.begin(self._descriptor, file.descriptor)
        if number is None:
            file.close()
        else:
            self.number, self._file = number, file

    def _write_down(self, data: bytes) -> None:
        if self._file is None and self._phase is Phase.IDLE and self._is_quiet:
            self._keep()  # there was no room for it before
        if self._file is None:
            return
        if self._journal is not None and self.cycle is not None and self.cycle.response_complete:
            self._journal.end()  # a moment before its owner does
        if self._phase is Phase.SENDING and self._is_quiet:
            self._look_at_unsent()  # a moment before it is due
        if self._is_refused or self._phase not in (Phase.IDLE, Phase.ARRIVING):
            self._forget()
            return
        num_sent = self._num_given() if self._phase is Phase.IDLE else 0
        num_noted = self._num_noted()
        if num_sent is None or num_noted is None:
            self._forget()
        elif self._file.append(Arrival(num_sent, num_noted + len(data), data)):
            self._phase = Phase.ARRIVING
        else:
            self._forget()

    def _open_journal(self, cycle: RequestResponseCycle, chance: Chance) -> Journal:
        """Begin the journal of a request that is accepted; see ``journal.py``."""
        alone = cycle is self.cycle and not (self.pipeline or self._in_headers)
        is_open = not (cycle.disconnected or self.transport.is_closing())
        if not (alone and is_open and self._phase is Phase.ARRIVING and self._file is not None):
            return Journal(chance)
        num_sent = self._num_given()
        if num_sent is None or not self._file.append(Opening(num_sent, chance)):
            self._forget()
            return Journal(chance)
        self._phase = Phase.ANSWERING
        self._journal = Journal(chance, file=self._file, on_end=self._let_go)
        return self._journal

    def _let_go(self) -> None:
        """The request's journal has ended: all is in it, or nobody can go on with it."""
        self._journal = None
        if self._phase is Phase.UNKNOWN:
            return
        if self.cycle is not None and self.cycle.response_complete:
            self._settle()
        else:
            self._forget()

    def _forget(self) -> None:
        """Not all is written down any more."""
        if self._file is not None:
            self._file.void()
        self._phase = Phase.UNKNOWN
        if self._journal is not None:
            self._journal.end()

    def _settle(self) -> None:
        """A response is complete: begin anew once it has been sent, unless more is under way."""
        if self._is_quiet:
            self._phase, self._num_looks = Phase.SENDING, 0
            self._look_at_unsent()
        else:
            self._forget()

    def _look_at_unsent(self) -> None:
        if self._phase is not Phase.SENDING:
            return
        if self._file is None:
            self._phase = Phase.IDLE
            return
        self._num_looks += 1
        is_late = self._num_looks * UNSENT_S > self._limits.stall_s
        if self.transport.is_closing():
            return  # its end is part of the response
        num_noted = self._num_noted()
        if num_noted is None or is_late:
            self._forget()
        elif self.transport.get_write_buffer_size():
            self.loop.call_later(UNSENT_S, self._look_at_unsent)
        else:
            self._file.clear(num_noted)
            self._phase = Phase.IDLE

    # -- the connection --------------------------------------------------------------------------

    def _num_given(self) -> int | None:
        """Return how many bytes the connection has been given in all its life; None where no
        descriptor is left to ask with.
        """
        try:
            return num_sent_bytes(self._descriptor) + self.transport.get_write_buffer_size()
        except OSError:
            return None

    def _num_noted(self) -> int | None:
        """Return how many bytes of the connection have been read and written down; None where no
        descriptor is left to ask with.
        """
        try:
            return num_read_bytes(self._descriptor) - self._num_unnoted
        except OSError:
            return None

    def _hang_up(self) -> None:
        """End the connection, though somebody else holds it, too."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as own:
            if os.fstat(own.fileno()).st_ino == self._inode:  # it may have been closed already
                own.shutdown(socket.SHUT_RDWR)
