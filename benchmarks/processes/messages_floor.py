"""Measures the lower bound of ``make bench-messages``: a process sends bytes to all workers of a
node, and each worker sends bytes back.
"""

from __future__ import annotations

import select
import socket

READ_BYTES = 1 << 16


class BarePeers:
    """Unix sockets that only transport bytes. They have no frames, no messages, no checks, and do
    not handle faults.

    Attributes:
        address: address of the socket file.
        num_workers: number of connected workers.
    """

    def __init__(self, path: str) -> None:
        self.address = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._peers: dict[int, socket.socket] = {}  # connections, by file descriptor
        self._epoll = select.epoll()

    @property
    def num_workers(self) -> int:
        return len(self._peers)

    def wait(self, timeout_s: float) -> None:
        """Wait until one worker has connected, or until the timeout."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        self._peers[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLIN)

    def round(self, data: bytes) -> None:
        """Send bytes to every worker, and return when every worker has replied."""
        for peer in self._peers.values():
            peer.send(data)
        left = len(self._peers)
        while left:
            for fd, _ in self._epoll.poll():
                self._peers[fd].recv(READ_BYTES)
                left -= 1

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._epoll.close()
        self._listener.close()
