"""The two sockets of a subscriber: one for messages, and one for replays."""

from __future__ import annotations

import socket
from collections.abc import Callable

import zmq

from dist_aclgraph.actors.wire.context import make_context

LOOPBACK = "127.0.0.1"
WAIT_MS = 60_000
NUMBER_BYTES = 8


def free_ports(count: int) -> range:
    """Return ``count`` consecutive port numbers. The ports were free a moment ago."""
    while True:
        held = []
        try:
            for _ in range(count):
                each = socket.socket()
                held.append(each)
                port = held[0].getsockname()[1] + len(held) - 1 if len(held) > 1 else 0
                each.bind((LOOPBACK, port))
            first = held[0].getsockname()[1]
            return range(first, first + count)
        except (OSError, OverflowError):
            pass
        finally:
            for each in held:
                each.close()


class Reader:
    """Reads one publisher's messages, and requests lost messages."""

    def __init__(self, port: int, replay_port: int | None = None) -> None:
        self._context = make_context()
        self._messages = self._context.socket(zmq.SUB)
        self._messages.setsockopt(zmq.RCVHWM, 1)  # messages wait at the publisher
        self._messages.connect(f"tcp://{LOOPBACK}:{port}")
        self._replays = self._context.socket(zmq.DEALER)
        if replay_port is not None:
            self._replays.connect(f"tcp://{LOOPBACK}:{replay_port}")
        self.topics: set[bytes] = set()

    def subscribe(self, publish: Callable[[bytes], None]) -> int:
        """Subscribe, and call ``publish`` until a message arrives; return the number of the first
        message.
        """
        self._messages.setsockopt(zmq.SUBSCRIBE, b"")
        while not self._messages.poll(10):
            publish(b"")
        return self.receive()[1]

    def receive(self) -> tuple[bytes, int, bytes]:
        assert self._messages.poll(WAIT_MS), "no message"
        topic, number, payload = self._messages.recv_multipart()
        assert len(number) == NUMBER_BYTES
        return topic, int.from_bytes(number, "big"), payload

    def receive_until(self, payload: bytes) -> tuple[bytes, int, bytes]:
        while (found := self.receive())[2] != payload:
            pass
        return found

    def first_gap(self, known: int, publish: Callable[[bytes], None]) -> int:
        """Read messages until a message number after ``known`` is missing; return the missing
        number.
        """
        while True:
            publish(b"")  # a reader notices a gap only when the next message arrives
            _, number, _ = self.receive()
            if number != known + 1:
                return known + 1
            known = number

    def request(self, *frames: bytes) -> None:
        self._replays.send_multipart(frames)

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Request all messages from number ``first`` on; return the messages that the publisher
        still stores.
        """
        self.request(b"", first.to_bytes(NUMBER_BYTES, "big"))
        found = []
        while True:
            assert self._replays.poll(WAIT_MS), "no answer"
            empty, topic, number, payload = self._replays.recv_multipart()
            assert empty == b""
            if not payload and int.from_bytes(number, "big", signed=True) == -1:
                return found
            self.topics.add(topic)
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self._context.destroy(linger=0)
