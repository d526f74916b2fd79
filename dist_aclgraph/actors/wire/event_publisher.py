"""Publishes numbered messages to subscribers outside the deployment, as vLLM's publisher does.

A message has three frames: topic, number (8 bytes, big-endian), payload. A subscriber that reads
too slowly loses messages. A subscriber that notices a gap in the numbers requests a replay at the
replay socket. The request consists of an empty frame, and a frame with the first missing number.
The answer contains all buffered messages from this number on. A last message with the number -1 and
an empty payload ends the answer.

Connections are neither encrypted nor authenticated. A subscriber can only read.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import zmq

from dist_aclgraph.actors.wire.addresses import (
    HANDSHAKE_MS,
    MAX_WAITING_CONNECTIONS,
    bind_to_one,
    url_host,
)
from dist_aclgraph.actors.wire.context import Context, make_context
from dist_aclgraph.actors.wire.sockets import Wakeup, has_message

NUMBER_BYTES = 8
LAST_NUMBER = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # marks the end of a replay
MAX_REQUEST_BYTES = 64  # ZeroMQ closes the connection of a subscriber that sends a longer frame
LAST_WORDS_MS = 200  # milliseconds for which ``close`` tries to send unsent messages


@dataclass(frozen=True)
class PublisherPlace:
    """The address and ports at which publishers listen, and their limits.

    Attributes:
        host: an address of this host.
        ports: each publisher listens at the first free port in this range.
        replay_ports: the ports for replays; None if messages are not replayed. A publisher that
            listens at the n-th port of ``ports`` uses the n-th port of ``replay_ports``.
        topic: the first frame of each message.
        buffer_steps: maximum number of messages that each publisher stores for replays.
        buffer_bytes: maximum total size of these messages, in bytes.
        max_unsent: maximum number of unread messages of one subscriber.
    """

    host: str
    ports: range
    replay_ports: range | None = None
    topic: bytes = b""
    buffer_steps: int = 10_000
    buffer_bytes: int = 256 << 20
    max_unsent: int = 1000


class EventPublisher:
    """Owns the sockets of one stream of messages. ``publish`` never waits.

    Only one thread may call ``publish``, and only one thread may call ``answer``. These two threads
    may differ.

    Attributes:
        index: index of the publisher's port in ``PublisherPlace.ports``.

    Raises:
        PlacementError: no port is free.
    """

    def __init__(self, context: Context, place: PublisherPlace) -> None:
        self._topic = place.topic
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._guard = threading.Lock()  # guards the buffer
        self._max_steps, self._max_bytes = place.buffer_steps, place.buffer_bytes
        self._num_bytes = 0
        self._next = 0
        self._out = self._socket(context, zmq.PUB, place.host, place.max_unsent)
        self.replays: zmq.Socket[bytes] | None = None
        if place.replay_ports is not None:
            # The queue of a subscriber can hold one whole replay. If the subscriber does not read
            # this replay, later replays for the subscriber are dropped.
            limit = place.buffer_steps + 1
            self.replays = self._socket(context, zmq.ROUTER, place.host, limit)
            self.replays.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        bind_to_one(
            place.ports,
            place.host,
            lambda port: self._bind(place, port),
            keys="kv.events.ports and kv.events.replay_ports, so that each data parallel rank gets "
            "a port from both",
            remedy="set kv.events.host to an address that each host with an engine has, such as "
            "0.0.0.0",
        )
        url = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.index = place.ports.index(int(url.rpartition(":")[2]))

    @staticmethod
    def _socket(context: Context, kind: int, host: str, max_unsent: int) -> zmq.Socket[bytes]:
        owned = context.socket(kind)
        owned.setsockopt(zmq.SNDHWM, max_unsent)
        owned.setsockopt(zmq.BACKLOG, MAX_WAITING_CONNECTIONS)
        owned.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        owned.setsockopt(zmq.IPV6, int(":" in host))
        return owned

    def _bind(self, place: PublisherPlace, port: int) -> None:
        """Listen at a port and at its replay port. If one of the two ports is in use, release the
        other port, and raise an error.
        """
        host = url_host(place.host)
        self._out.bind(f"tcp://{host}:{port}")
        if self.replays is not None and place.replay_ports is not None:
            replay_port = place.replay_ports[place.ports.index(port)]
            try:
                self.replays.bind(f"tcp://{host}:{replay_port}")
            except zmq.ZMQError:
                self._out.unbind(self._out.getsockopt_string(zmq.LAST_ENDPOINT))
                raise

    def publish(self, payload: bytes) -> None:
        """Give a message its number, store it for replays, and send it to all subscribers."""
        number, self._next = self._next, self._next + 1
        if self.replays is not None:
            with self._guard:
                self._buffer.append((number, payload))
                self._num_bytes += len(payload)
                while len(self._buffer) > self._max_steps or self._num_bytes > self._max_bytes:
                    self._num_bytes -= len(self._buffer.popleft()[1])
        self._out.send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload))

    def answer(self) -> None:
        """Answer the next request for a replay; ignore a malformed request."""
        assert self.replays is not None
        identity, *frames = self.replays.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
            return
        first = int.from_bytes(frames[1], "big")
        with self._guard:
            wanted = [each for each in self._buffer if each[0] >= first]
        for number, payload in wanted:
            number_frame = number.to_bytes(NUMBER_BYTES, "big")
            self.replays.send_multipart((identity, b"", self._topic, number_frame, payload))
        self.replays.send_multipart((identity, b"", b"", LAST_NUMBER, b""))


class EventPublishers:
    """Owns the publishers of a group, and the thread that answers requests for replays.

    Args:
        count: number of publishers.

    Raises:
        PlacementError: there are too few free ports.
    """

    def __init__(self, place: PublisherPlace, count: int) -> None:
        self._context = make_context()
        try:
            self._publishers = [EventPublisher(self._context, place) for _ in range(count)]
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakeup = Wakeup()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if place.replay_ports is not None:
            self._thread = threading.Thread(target=self._replay, name="kv-replays", daemon=True)
            self._thread.start()

    def __getitem__(self, index: int) -> EventPublisher:
        return self._publishers[index]

    def close(self) -> None:
        """Send the unsent messages; this takes at most ``LAST_WORDS_MS``. Release the ports."""
        self._is_closing = True
        self._wakeup.wake()
        if self._thread is not None:
            self._thread.join()
        self._wakeup.close()
        self._context.destroy(linger=LAST_WORDS_MS)

    def _replay(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for each in self._publishers:
            assert each.replays is not None
            poller.register(each.replays, zmq.POLLIN)
        while not self._is_closing:
            poller.poll()
            for each in self._publishers:
                if each.replays is not None and has_message(each.replays):
                    each.answer()
