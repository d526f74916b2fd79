"""Ports for the services and deployments that tests start.

Several processes run tests at the same time on one machine. Each process owns a block of ports, so
that no other test takes a port before its owner uses it. The blocks lie below the ports that Linux
gives to programs that request any free port.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket

FIRST, BLOCK, NUM_BLOCKS = 20_000, 400, 30


@functools.cache
def _own_block(process: int) -> tuple[socket.socket, itertools.cycle[int]]:
    """Reserve a block of ports; return its ports, and a socket. The name of the socket marks the
    block as reserved.

    Args:
        process: id of this process. A forked process has another id, so it gets another block.
    """
    for number in range(NUM_BLOCKS):
        owner = socket.socket(socket.AF_UNIX)
        try:
            owner.bind(f"\0tests-ports-{number}")
        except OSError:
            owner.close()
            continue
        first = FIRST + number * BLOCK
        return owner, itertools.cycle(range(first, first + BLOCK))
    raise RuntimeError(f"{NUM_BLOCKS} processes run tests on this machine; end one of them")


def free_port() -> int:
    """Return a port at which no process listens, and which no recent call has returned."""
    _, ports = _own_block(os.getpid())
    return next(filter(is_free, ports))


def free_ports(count: int) -> range:
    """Return consecutive ports, for example for ``cluster.ports``; see ``free_port``."""
    while True:
        found = [free_port() for _ in range(count)]
        if found[-1] - found[0] == count - 1:
            return range(found[0], found[-1] + 1)


def is_free(port: int) -> bool:
    """Return whether no process listens at ``port``, at any address of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
