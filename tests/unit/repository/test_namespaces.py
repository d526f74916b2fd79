"""Network namespaces that act as nodes. They reach each other over a network, share nothing else,
and end together with their processes.
"""

import socket
import subprocess
import sys
import time

import pytest

from tools.namespaces import nodes, why_no_nodes

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


def test_this_machine_sees_the_processes_and_the_files_of_a_node():
    with nodes(2) as (first, second):
        first.run(["touch", "/dev/shm/mine"], 30)
        say_id = ["sh", "-c", "echo $$; exec sleep 1000"]
        with first.start(say_id, stdout=subprocess.PIPE, text=True) as waiting:
            inner = int(waiting.stdout.readline())

            assert [path.name for path in (first.files / "dev/shm").iterdir()] == ["mine"]
            assert list(first.pids().values()) == [inner]
            assert second.pids() == {}
            first.kill()


def test_a_thread_in_the_network_of_a_node_has_the_addresses_of_the_node():
    def can_listen() -> bool:
        with socket.socket() as server:
            try:
                server.bind((first.address, 0))
            except OSError:
                return False
            return True

    with nodes(1) as (first,):
        with first.network():
            assert can_listen()
        assert not can_listen()
