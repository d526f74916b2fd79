"""The fork server's client. Ray starts this program instead of Python, and so gets a forked worker.

Ray runs this file by its path. The program needs only the standard library. If the server does not
answer, this program replaces itself by a new Python process, which must import all libraries.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

STREAMS = (0, 1, 2)
WAIT_S = 120.0  # time limit in seconds; enough to load a server's libraries on a busy machine


def hand_over(path: str, arguments: list[str]) -> bool:
    """Ask the server at ``path`` to fork a process that runs Python with ``arguments``.

    Returns:
        Whether the server has forked the process.
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
