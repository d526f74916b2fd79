"""If the limit of open files is low, the service allows fewer connections. A warning contains the
allowed number of connections.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.serve.http.open_files import OTHER_FILES, allow_connections
from tests.slow import slow

SCRIPT = """
import resource, sys
from dist_aclgraph.cli.serve import _allow_connections
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
_allow_connections(1000)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "soft", "said"),
    [
        # 1,000 connections use 2,000 descriptors, and the process uses 512 other descriptors.
        slow(4096, 2512, ""),
        (2000, 2000, "only 992 connections may be open, and 496 of them outlive"),
        slow(1200, 1200, "only 459 connections may be open, and 229 of them outlive"),
        slow(1024, 1024, "only 342 connections may be open, and 170 of them outlive"),
    ],
)
def test_a_low_limit_of_open_files_gives_a_warning(hard: int, soft: int, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hard)], capture_output=True, text=True, timeout=60
    )

    assert run.stdout == f"{soft}\n", run.stderr
    assert said in run.stderr if said else "outlive" not in run.stderr


@given(st.integers(64, 1 << 17), st.integers(1, 65536))
def test_the_descriptors_of_clients_and_journals_fit_the_limit(limit: int, wanted: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        max_open, max_kept = allow_connections(wanted)

    assert 0 < max_kept <= max_open <= wanted
    assert max_open + max_kept <= limit
    if limit >= 1024:
        assert max_open + max_kept + OTHER_FILES <= limit
    if limit >= 2 * wanted + OTHER_FILES:
        assert (max_open, max_kept) == (wanted, wanted)


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
from dist_aclgraph.config import ServeConfig
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer, listen
server = HttpServer(ServeConfig(), listen("127.0.0.1", 0))
server.start(Front("no API"))
print(server.port, flush=True)
sys.stdin.read()
server.stop()
"""


def test_connections_beyond_the_limit_of_open_files_get_an_answer() -> None:
    """Without the service's own limit, accept() would fail, and clients would wait."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as child,
        ExitStack() as s,
    ):
        address = "127.0.0.1", int(child.stdout.readline())
        for _ in range(200):
            s.enter_context(socket.create_connection(address, 60)).sendall(b"GET / HTTP/1.1\r\n")
        last = s.enter_context(socket.create_connection(address, 60))
        last.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

        assert b"200 connections are open" in last.recv(65536)
        child.stdin.close()
