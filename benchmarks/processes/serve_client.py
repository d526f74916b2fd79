"""The client of ``make bench-serve``: one thread reads the bytes of all streams as they arrive."""

from __future__ import annotations

import itertools
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

READ_BYTES = 1 << 16
FRAME_END = b"\n\n"
FRAMES = re.compile(rb"data: .*?\n\n", re.DOTALL)


@dataclass(frozen=True)
class Ask:
    """A command to the client: open several streams, with the same request, at a server on this
    machine.
    """

    ports: tuple[int, ...]  # the streams are spread over these ports
    request: bytes
    num_streams: int


@dataclass
class Stream:
    """One streamed reply of a server.

    Attributes:
        arrivals_s: for each frame, the time at which its end was read, on the system's monotonic
            clock.
        received: all bytes of the reply.
    """

    arrivals_s: list[float] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes, now_s: float) -> bool:
        """Record new bytes. Return whether the reply is complete now."""
        # The end of a frame is two bytes. The first of these two bytes may have arrived with
        # earlier data.
        seen = max(0, len(self.received) - 1)
        self.received += data
        self.arrivals_s += [now_s] * self.received.count(FRAME_END, seen)
        return not data or self.received.endswith(b"\r\n0\r\n\r\n")

    @property
    def frames(self) -> list[bytes]:
        return FRAMES.findall(bytes(self.received))


def read_streams(ask: Ask) -> list[Stream]:
    """Open the streams, and read each one to its end."""
    with selectors.DefaultSelector() as selector:
        streams = [Stream() for _ in range(ask.num_streams)]
        for stream, port in zip(streams, itertools.cycle(ask.ports), strict=False):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(ask.request)
            selector.register(connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                opened = key.fileobj
                assert isinstance(opened, socket.socket)
                if key.data.take(opened.recv(READ_BYTES), time.monotonic()):
                    selector.unregister(opened)
                    opened.close()
    return streams


def run_client(asks: Connection) -> None:
    """Reply to each ``Ask`` with the arrival times of all streams and the frames of the first
    stream.
    """
    while (ask := asks.recv()) is not None:
        streams = read_streams(ask)
        asks.send(([stream.arrivals_s for stream in streams], streams[0].frames))


def make_request(path: str, body: bytes) -> bytes:
    """Return an HTTP request that asks the server to close the connection after the reply."""
    lines: Sequence[bytes] = (
        b"POST %s HTTP/1.1" % path.encode(),
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
        b"",
        body,
    )
    return b"\r\n".join(lines)
