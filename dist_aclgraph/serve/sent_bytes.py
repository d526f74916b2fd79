"""How much a client's connection has taken and given; how to write the rest of a response alone."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from typing import Any

# tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, linux/tcp.h
_INFO_BYTES, _ACKED_AT, _RECEIVED_AT = 232, 120, 128
_ESTABLISHED = 1  # its first byte, linux/tcp_states.h
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
    acked, waiting = _stable(connection, _ACKED_AT, termios.TIOCOUTQ)
    return acked + waiting


def num_read_bytes(connection: int) -> int:
    """Return how many bytes have been read of a TCP connection, in all its life; its end may count
    as one.

    Args:
        connection: a descriptor.

    Raises:
        OSError: it is no connection.
    """
    received, waiting = _stable(connection, _RECEIVED_AT, termios.FIONREAD)
    return received - waiting


def is_open(connection: int) -> bool:
    """Return whether neither side has ended a TCP connection.

    Args:
        connection: a descriptor.

    Raises:
        OSError: it is no connection.
    """
    with socket.socket(fileno=os.dup(connection)) as own:
        return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _stable(connection: int, counter_at: int, queue: int) -> tuple[int, int]:
    """Return a counter of the kernel and the length of a queue, both of one moment."""
    with socket.socket(fileno=os.dup(connection)) as own:
        count, waiting = -1, 0
        while True:
            # What moves in between would be counted nowhere, or twice.
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            before, count = count, int(_U64.unpack_from(info, counter_at)[0])
            if before == count:
                return count, waiting
            waiting = _INT.unpack(fcntl.ioctl(own, queue, bytes(_INT.size)))[0]


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
