"""ZeroMQ contexts that can be closed without waiting for peers."""

from __future__ import annotations

from typing import TypeAlias

import zmq

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class _Context(Context):
    def __del__(self) -> None:
        """Do not wait for open sockets.

        If the garbage collector frees a context together with the context's sockets, the order is
        undefined. The inherited method would wait forever for a socket that is freed later.
        """


def make_context() -> Context:
    """Return a context whose sockets drop unsent messages when they are closed.

    A socket whose last messages should arrive is closed with a time limit (``linger``). By default,
    a context that is collected as garbage would wait for its peers without a limit.
    """
    context: Context = _Context()
    context.setsockopt(zmq.LINGER, 0)
    return context
