"""Sends requests as many clients: ``python -m tests.serve.many_clients PORT COUNT STATUS REQUEST``.

This program uses plain sockets, so that it needs little CPU time. It prints, for each request, the
seconds until its response began.
"""

from __future__ import annotations

import resource
import selectors
import socket
import subprocess
import sys
import time

WAIT_S = 180.0


def ask_all(port: int, count: int, status: int, request: bytes) -> list[float]:
    """Connect ``count`` clients, and send a request of each; return the seconds that each waits for
    its response.
    """
    command = [sys.executable, "-m", __name__, str(port), str(count), str(status), request.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def _ask(port: int, count: int, status: int, request: bytes) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    waiting = selectors.DefaultSelector()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    _wait_until_served(clients[-1], request)
    asked_s = {}
    for client in clients:
        waiting.register(client, selectors.EVENT_READ)
        asked_s[client] = time.perf_counter()
        client.sendall(request)
    answered_s = {}
    while len(answered_s) < count:
        found = waiting.select(WAIT_S)
        assert found, f"{len(answered_s)} of {count} have an answer"
        for key, _ in found:
            answered_s[key.fileobj] = time.perf_counter()
            waiting.unregister(key.fileobj)
    for client in clients:
        assert client.recv(1 << 16).split()[1] == str(status).encode()
    print(*(answered_s[client] - asked_s[client] for client in clients), sep="\n")


def _wait_until_served(client: socket.socket, request: bytes) -> None:
    """Send a request on the connection that was opened last. The response to this request shows
    that the service has accepted all connections.
    """
    client.settimeout(WAIT_S)
    client.sendall(request)
    assert client.recv(1 << 16)


if __name__ == "__main__":
    _ask(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
