"""What our sockets share: reading frames that anybody may have sent, and waking their thread."""

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
DRAINED_BYTES = 4096  # of wake-ups at once


def read_frame(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Return the message in ``frame``.

    Raises:
        NotAMessageError: the bytes are no message; any bytes lead to this error only.
    """
    try:
        return decoder.decode(frame)
    # Text that is not UTF-8, and fields nested too deep, are no errors of msgspec's own.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise NotAMessageError(f"{len(frame)} bytes are not a message of ours: {e}") from None


def has_message(owned: zmq.Socket[bytes]) -> bool:
    """Say whether a socket has a message, at a fraction of what ``poll`` costs."""
    return bool(int(owned.get(zmq.EVENTS)) & zmq.POLLIN)


class Wakeup:
    """Ends the poll of an I/O thread from another thread. ``fileno`` is what to poll."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)

    def fileno(self) -> int:
        return self._in.fileno()

    def wake(self) -> None:
        # A full socket has wake-ups already, and a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._out.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._in.recv(DRAINED_BYTES)) == DRAINED_BYTES:
                pass

    def close(self) -> None:
        self._out.close()
        self._in.close()
