"""A process can end even if its ZeroMQ context was not closed."""

from __future__ import annotations

import subprocess
import sys

from tests.ports import free_port

# This program sends a message to a peer that does not exist.
DROP = """
import sys
import zmq
from dist_aclgraph.actors.wire.context import make_context

socket = make_context().socket(zmq.DEALER)
socket.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
socket.send(b"a message for an absent peer")
del socket
print("dropped")
"""

# The context and its socket are in one reference cycle. The garbage collector clears the context's
# weak reference to the socket, and then frees the context before the socket.
CYCLE = """
import gc
import zmq
from dist_aclgraph.actors.wire.context import make_context

class Node:
    pass

gc.disable()
node = Node()
node.context, node.cycle = make_context(), node
node.socket = node.context.socket(zmq.DEALER)
del node
gc.collect()
print("dropped")
"""


def test_a_dropped_context_waits_for_no_peer() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DROP, str(free_port())],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert ended.stdout == "dropped\n"


def test_a_context_in_a_cycle_of_references_waits_for_no_socket() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CYCLE], capture_output=True, text=True, timeout=120, check=True
    )

    assert ended.stdout == "dropped\n"
