"""Inlet: has the event loop read a kept connection into the intake (``intake.py``)."""

from __future__ import annotations

import asyncio

from dist_aclgraph.serve.intake import Intake
from dist_aclgraph.serve.kept_protocol import KeptProtocol


class Inlet(asyncio.BufferedProtocol):
    """What the event loop knows of a connection. uvicorn's protocols do not say where they want to
    be read into.
    """

    def __init__(self, intake: Intake, protocol: KeptProtocol) -> None:
        self._intake = intake
        self._protocol = protocol

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.begin(self._protocol.number or 0)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._protocol.data_received(self._intake.read(nbytes))
        finally:
            self._intake.forget(nbytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
