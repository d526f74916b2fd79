"""ZeroMQ contexts that can be closed without waiting for peers."""

from __future__ import annotations

from typing import TypeAlias

import zmq

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class _Context(Context):
    def __del__(self) -> None:
        """Free the context without waiting for its open sockets.

        If the garbage collector frees a context together with its sockets, the collector may free
        the context first. In this case, ``__del__`` of the base class would wait forever for the
        sockets.
        """


def make_context() -> Context:
    """Return a context whose sockets drop unsent messages when they are closed.

    To wait until the last messages of a socket are sent, close the socket with a time limit
    (``linger``). With ZeroMQ's default, closing a context waits without a limit for unsent
    messages. A garbage collection that frees a context waits in the same way.
    """
    context: Context = _Context()
    context.setsockopt(zmq.LINGER, 0)
    return context
