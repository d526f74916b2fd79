"""Counts the bytes that were read from a TCP connection, and the bytes that were sent over the
connection.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import NamedTuple

# Fields of struct tcp_info (linux/tcp.h): tcpi_state, tcpi_bytes_acked and tcpi_bytes_received.
_INFO_BYTES = 232
_COUNTS = struct.Struct("=B119xQQ")
_ESTABLISHED = 1  # linux/tcp_states.h
_INT = struct.Struct("=i")


class Counters(NamedTuple):
    """The kernel's counts of a connection. Only the difference of two counts has a meaning.

    Attributes:
        num_read: number of bytes that were read from the connection. The kernel can count the end
            of the connection (FIN) as one byte.
        num_sent: number of bytes that were passed to the kernel for sending.
        is_open: true until the client or this host closes the connection.
    """

    num_read: int
    num_sent: int
    is_open: bool


def read_counters(connection: int) -> Counters:
    """Return the counters of a connection. All counters are from the same moment.

    Raises:
        OSError: the descriptor is not a TCP connection.
    """
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
    try:
        before: tuple[int, ...] = ()
        num_unread = num_unacked = 0
        while True:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            state, num_acked, num_received = found = _COUNTS.unpack_from(info)
            # Accept the counts only if TCP_INFO was equal before and after both ioctl calls.
            # Otherwise a byte could be counted twice or not at all.
            if found == before:
                return Counters(
                    num_received - num_unread, num_acked + num_unacked, state == _ESTABLISHED
                )
            before = found
            num_unread = _INT.unpack(fcntl.ioctl(own, termios.FIONREAD, bytes(_INT.size)))[0]
            num_unacked = _INT.unpack(fcntl.ioctl(own, termios.TIOCOUTQ, bytes(_INT.size)))[0]
    finally:
        own.detach()


def hang_up(connection: int) -> None:
    """End a connection, even if another process has a descriptor of the connection."""
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
    try:
        own.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client has ended the connection
    finally:
        own.detach()
