"""The program that Ray starts in place of Python for a forked worker: a client of the fork server.

It is run by its path, and needs only the standard library. Without an answer it becomes the Python
that Ray meant, which loads everything itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

STREAMS = (0, 1, 2)
WAIT_S = 120.0  # longer than a server loads on a busy machine


def hand_over(path: str, arguments: list[str]) -> bool:
    """Have the server at ``path`` fork a process that takes over what this one was started with.

    Returns:
        Whether it has done so.
    """
    variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    request = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.fsdecode(v).split("=", 1) for v in variables if b"=" in v),
    }
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(WAIT_S)
            server.connect(path)
            socket.send_fds(server, [b"\n"], STREAMS)
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            return bool(server.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    socket_path, *rest = sys.argv[1:]
    if not hand_over(socket_path, rest):
        os.execv(sys.executable, [sys.executable, *rest])
