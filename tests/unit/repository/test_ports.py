"""Processes that run tests at the same time do not get the same ports."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.ports import BLOCK, free_port, free_ports

HOLD = "from tests.ports import free_ports; print(*free_ports(3), flush=True); input()"


def test_processes_beside_each_other_get_other_ports() -> None:
    blocks = {free_port() // BLOCK}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    found = [[int(port) for port in p.stdout.readline().split()] for p in started if p.stdout]
    for process in started:
        process.communicate("\n")

    blocks.update(port // BLOCK for ports in found for port in ports)
    assert len(blocks) == 3
    assert all(ports == list(range(ports[0], ports[0] + 3)) for ports in found)


def test_a_port_at_which_a_process_listens_is_left_out() -> None:
    before = free_port()
    with socket.create_server(("127.0.0.1", before + 2)):
        assert before + 2 not in free_ports(4)
