"""Helpers for I/O threads: they decode frames of untrusted peers, and wake a thread that polls."""

from __future__ import annotations

import contextlib
import socket
from typing import TypeVar

import msgspec
import zmq

from dist_aclgraph.errors import NotAMessageError

T = TypeVar("T")

# ZeroMQ closes the connection of a peer that announces a longer frame.
MAX_MESSAGE_BYTES = 64 << 20
POLLIN = int(zmq.POLLIN)  # a plain number, because operations of enum flags are slow
DRAINED_BYTES = 4096  # maximum number of wake-up bytes in one read


def read_frame(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Return the message in ``frame``.

    Raises:
        NotAMessageError: the bytes are no valid message. No other error is possible.
    """
    try:
        return decoder.decode(frame)
    # UnicodeDecodeError means that a text is not UTF-8. RecursionError means that fields are nested
    # too deeply.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise NotAMessageError(f"{len(frame)} bytes are not a message of ours: {e}") from None


def has_message(owned: zmq.Socket[bytes]) -> bool:
    """Return whether a socket has a message. This call is much cheaper than ``poll``."""
    return bool(int(owned.get(zmq.EVENTS)) & POLLIN)


class Wakeup:
    """Lets a thread wake an I/O thread that polls. The I/O thread must also poll ``fileno``."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)

    def fileno(self) -> int:
        return self._in.fileno()

    def wake(self) -> None:
        # Two errors are ignored. If the socket is full, the bytes in the socket already wake the
        # thread. If the socket is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._out.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._in.recv(DRAINED_BYTES)) == DRAINED_BYTES:
                pass

    def close(self) -> None:
        self._out.close()
        self._in.close()
