"""Steps between an engine and workers on other nodes.

The channel uses ZeroMQ with CURVE keys: plans are sent by PUB/SUB sockets, and results by PUSH/PULL
sockets. The topic of a plan is a data-parallel rank. A worker receives only the plans of its own
data-parallel rank. ``addresses.py`` explains the addresses.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from dist_aclgraph.actors.wire.addresses import Endpoint, Listener, Place
from dist_aclgraph.actors.wire.context import make_context
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES, has_message
from dist_aclgraph.errors import EngineDeadError

LOOK_MS = 500  # milliseconds between two checks whether a wait should end
TOPIC = struct.Struct("<I")  # Each plan begins with its data-parallel rank in this format.
# The keys are the first byte of an XPUB frame: 1 for a new subscription, 0 for the end of a
# subscription. Each value is the change in the number of workers.
WORKERS_OF_FRAME = {1: 1, 0: -1}
FAREWELL_MS = 200  # time limit in milliseconds for sending the last frame when a socket is closed


@dataclass(frozen=True)
class Endpoints:
    """The endpoints to which a worker on another node connects, and the worker's data-parallel
    rank.
    """

    plans: Endpoint
    results: Endpoint
    dp_rank: int = 0


class RemotePeers:
    """The engine's side of the channel. Owns both sockets. Only one thread may use this object.

    Attributes:
        num_workers: number of connected workers.

    Raises:
        PlacementError: no port is free.
    """

    def __init__(self, place: Place) -> None:
        self.num_workers = 0
        self._context = make_context()
        self._plans = self._context.socket(zmq.XPUB)
        # Several workers subscribe to the same topic. Without the option XPUB_VERBOSER, the socket
        # would report only the first subscription and the last unsubscription.
        self._plans.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._results = self._context.socket(zmq.PULL)
        self._listener = Listener(self._context, place)
        self._plans_at = self._listener.bind(self._plans, "plans")
        self._results_at = self._listener.bind(self._results, "results")
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(self._results, zmq.POLLIN)

    def address_for(self, node_id: str, dp_rank: int = 0) -> Endpoints:
        """Return the addresses to which a worker of ``dp_rank`` on another node connects."""
        plans, results = self._plans_at.seen_from(node_id), self._results_at.seen_from(node_id)
        return Endpoints(plans, results, dp_rank)

    def wait(self, timeout_s: float, beside: int | None = None) -> bool:
        """Wait until a socket or the file descriptor ``beside`` is readable. Return False after a
        timeout.
        """
        if beside is not None and beside not in self._poller:
            self._poller.register(beside, zmq.POLLIN)
        found = self._poller.poll(int(timeout_s * 1e3))
        while has_message(self._plans):
            change = self._plans.recv()
            if len(change) == 1 + TOPIC.size:
                self.num_workers += WORKERS_OF_FRAME.get(change[0], 0)
        return bool(found)

    def poll_frame(self) -> bytes | None:
        """Return the next frame of any worker; None if there is none."""
        return self._results.recv() if has_message(self._results) else None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one frame to each worker.

        Args:
            frames: the frame of each data-parallel rank.
        """
        for dp_rank, frame in enumerate(frames):
            self._plans.send(TOPIC.pack(dp_rank) + frame)

    def close(self) -> None:
        self._plans.close(linger=FAREWELL_MS)
        self._results.close(linger=0)
        self._listener.close()
        self._context.term()


class RemoteEngine:
    """A worker's side of the channel. Owns both sockets. Only one thread may use this object."""

    def __init__(self, address: Endpoints) -> None:
        self._is_over = threading.Event()
        self._context = make_context()
        self._plans = self._context.socket(zmq.SUB)
        self._results = self._context.socket(zmq.PUSH)
        for socket in (self._plans, self._results):
            socket.setsockopt(zmq.LINGER, FAREWELL_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        address.results.connect(self._results)
        self._plans.setsockopt(zmq.SUBSCRIBE, TOPIC.pack(address.dp_rank))
        address.plans.connect(self._plans)

    def has_message(self) -> bool:
        """Return whether ``receive`` would return at once."""
        return has_message(self._plans)

    def receive(self) -> bytes:
        """Return the next frame.

        Raises:
            EngineDeadError: ``end`` was called. ZeroMQ does not report the death of the engine.
        """
        while not self._plans.poll(LOOK_MS):
            if self._is_over.is_set():
                raise EngineDeadError("the engine on another node is given up")
        return self._plans.recv()[TOPIC.size :]

    def end(self) -> None:
        """Make a waiting ``receive`` raise. Any thread may call this."""
        self._is_over.set()

    def send(self, frame: bytes) -> None:
        self._results.send(frame)

    def close(self) -> None:
        self._plans.close()
        self._results.close()
        self._context.term()
