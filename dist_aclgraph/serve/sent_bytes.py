"""How much of a response a client's connection has taken, and how to write only the rest of it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from typing import Any

# tcpi_bytes_acked of struct tcp_info, linux/tcp.h
_INFO_BYTES, _ACKED_AT = 232, 120
_U64, _INT = struct.Struct("=Q"), struct.Struct("=i")
BEGUN = b"HTTP/1.1 200 "  # of a response that can go on


def num_sent_bytes(connection: int) -> int:
    """Return how many bytes the kernel has taken for a TCP connection, in all its life.

    Only the difference of two readings has a meaning. Bytes that wait in this process are not
    among them.

    Args:
        connection: a descriptor.

    Raises:
        OSError: it is no connection.
    """
    with socket.socket(fileno=os.dup(connection)) as own:
        acked, waiting = -1, 0
        while True:
            # What is acknowledged in between would be counted nowhere, or twice.
            before, acked = acked, _num_acked(own)
            if before == acked:
                return acked + waiting
            waiting = _INT.unpack(fcntl.ioctl(own, termios.TIOCOUTQ, bytes(_INT.size)))[0]


def _num_acked(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(_U64.unpack_from(info, _ACKED_AT)[0])


class RestTransport:
    """A transport that leaves out the first bytes of what is written; all else is the other's.

    Args:
        num_bytes: how many have been sent before.
    """

    def __init__(self, transport: asyncio.Transport, num_bytes: int) -> None:
        self._transport = transport
        self._num_bytes = num_bytes
        self._is_begun = False

    @property
    def owes_nothing(self) -> bool:
        """Whether all that had been sent before has been written again."""
        return not self._num_bytes

    def write(self, data: bytes) -> None:
        if self._num_bytes and not self._is_begun and not data.startswith(BEGUN):
            self._transport.abort()  # what had begun cannot become a refusal
            return
        self._is_begun = True
        if not self._num_bytes:
            self._transport.write(data)
        elif len(data) > self._num_bytes:
            self._transport.write(data[self._num_bytes :])
            self._num_bytes = 0
        else:
            self._num_bytes -= len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
