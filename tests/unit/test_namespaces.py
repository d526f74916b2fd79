"""Network namespaces that act as nodes: the nodes reach each other, share nothing, and end together
with their processes.
"""

import sys
import time

import pytest

from tests.namespaces import nodes, why_no_nodes

pytestmark = pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or "")

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""
REACH = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
"""


def test_nodes_reach_each_other_over_their_links_and_end_as_a_whole():
    serve = [sys.executable, "-c", SERVE]
    with nodes(2) as (first, second), first.start([*serve, first.address], stdout=-1) as server:
        assert server.stdout and server.stdout.readline() == b"listening\n"
        reach = [sys.executable, "-c", REACH, first.address]
        assert second.run([*reach, "30"], 60).returncode == 0
        second.set_link(False)
        assert second.run([*reach, "0.5"], 60).returncode != 0
        second.set_link(True)
        deadline = time.monotonic() + 60
        while second.run([*reach, "5"], 60).returncode:
            assert time.monotonic() < deadline
        first.kill()
        assert server.wait(30) != 0


def test_the_memory_of_a_node_is_its_own():
    with nodes(2) as (first, second):
        assert first.run(["touch", "/dev/shm/mine"], 30).returncode == 0
        assert first.run(["ls", "/dev/shm"], 30).stdout == "mine\n"
        assert second.run(["ls", "/dev/shm"], 30).stdout == ""
        temporary = first.temporary
        assert temporary.is_dir()
    assert not temporary.exists()
