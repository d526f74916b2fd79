"""A service for tests that kill its ingress, and the answers that its clients read."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.arrays.ints import INT_BYTES
from tests.serve.conftest import until
from tests.serve.fake_engine import FakeEngine

INGRESS = "serve:ingress"
WAIT_S = 180.0
MANY_BYTES = 64 << 20  # more bytes than the kernel buffers for a connection
BY_CHANCE = re.compile(rb'"(id|item_id|created|created_at)":("[^"]*"|[0-9]+),')
HEADERS = "Host: x\r\nContent-Type: application/json\r\n"


def by_position(submit: Submit) -> list[int]:
    """Return output tokens that depend only on their positions."""
    first = len(submit.prompt) // INT_BYTES
    return [60 + (first + i) * 7919 % 97 for i in range(submit.max_tokens)]


@dataclass
class Answer:
    """The bodies of all responses that a client has received over one connection."""

    error: str = ""
    bodies: list[bytes] = field(default_factory=list)

    def read(self, stream: BinaryIO) -> None:
        """Read one response. The headers determine how the body ends."""
        status = stream.readline()
        assert status.startswith(b"HTTP/1.1 200"), status
        headers = {}
        while (line := stream.readline()) != b"\r\n":
            assert line, "the connection ended"
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        body = b""
        if b"content-length" in headers:
            body = stream.read(int(headers[b"content-length"]))
        elif b"transfer-encoding" not in headers:  # in HTTP/1.0, the connection's end ends the body
            body = stream.read()
        else:
            while size := int(stream.readline(), 16):
                body += stream.read(size)
                assert stream.read(2) == b"\r\n"
            assert stream.read(2) == b"\r\n"
        # Frames of different choices have no fixed order, so they are compared choice by choice.
        frames = BY_CHANCE.sub(b"", body).split(b"\n\n")
        self.bodies.append(b"\n".join(sorted(frames, key=_choice_of)))


def _choice_of(frame: bytes) -> bytes:
    found = re.search(rb'"choices":\[\{"index":([0-9]+)', frame)
    return found[1] if found else b"~"  # frames that belong to no choice are last


def num_descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass
class Service:
    process: subprocess.Popen[str]
    port: int
    engine: FakeEngine

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def ask(self, request: bytes, count: int = 1) -> Answer:
        """Send the same request ``count`` times over one connection. Each request follows the
        response to the previous request.
        """
        answer = Answer()
        try:
            with self.connect() as client, client.makefile("rb") as stream:
                for _ in range(count):
                    client.sendall(request)
                    answer.read(stream)
        except (OSError, AssertionError, ValueError) as e:
            answer.error = repr(e)
        return answer

    def ask_all(self, requests: list[bytes], count: int = 1) -> list[Answer]:
        answers: list[Answer] = [Answer()] * len(requests)

        def ask(index: int) -> None:
            answers[index] = self.ask(requests[index], count)

        threads = [threading.Thread(target=ask, args=[i]) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def ingress(self, other_than: int = 0) -> int:
        """Return the process id of the ingress, which serves HTTP; 0 while there is no ingress."""
        children = processes.children(self.process.pid)
        found = [p for p in children if processes.name_of(p) == INGRESS and p != other_than]
        return found[0] if found else 0

    def kill(self) -> None:
        """Kill the ingress, and wait until the next one runs."""
        until(lambda: self.ingress() > 0, WAIT_S)
        pid = self.ingress()
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.ingress(other_than=pid) > 0, WAIT_S)

    def wait_for_tokens(self, count: int) -> None:
        """Wait until the engine has generated ``count`` more tokens."""
        wanted = self.engine.metrics["generation_tokens"] + count
        until(lambda: self.engine.metrics["generation_tokens"] >= wanted, WAIT_S)

    @contextmanager
    def stopped_after(self, count: int) -> Iterator[None]:
        """Stop the engine after ``count`` more tokens. The engine goes on when the context ends."""
        self.engine.token_limit = self.engine.metrics["generation_tokens"] + count
        try:
            until(
                lambda: self.engine.metrics["generation_tokens"] >= self.engine.token_limit, WAIT_S
            )
            yield
        finally:
            self.engine.token_limit = None

    @contextmanager
    def killed_after(self, *counts: int) -> Iterator[None]:
        """Within this context, for each number in ``counts``: wait for this number of further
        tokens, and then kill the ingress.
        """

        def strike() -> None:
            for count in counts:
                with self.stopped_after(count):
                    self.kill()

        striking = threading.Thread(target=strike)
        striking.start()
        yield
        striking.join()

    def wait_until_read(self, client: socket.socket) -> None:
        """Wait until the ingress has read all bytes that ``client`` has sent."""
        host, port = client.getsockname()
        address = socket.inet_aton(host)[::-1].hex().upper()

        def is_read() -> bool:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                _, local, remote, _, queues, *_ = line.split()
                if (local, remote) == (f"{address}:{self.port:04X}", f"{address}:{port:04X}"):
                    return queues.endswith(":00000000")
            return False

        until(is_read, WAIT_S)

    @property
    def num_descriptors(self) -> int:
        return num_descriptors_of(self.process.pid)

    def num_descriptors_at_rest(self) -> int:
        """Wait until the number of the supervisor's open descriptors no longer changes; return this
        number.
        """
        found = [self.num_descriptors]

        def is_at_rest() -> bool:
            time.sleep(0.3)
            found.append(self.num_descriptors)
            return found[-1] == found[-2]

        until(is_at_rest, WAIT_S)
        return found[-1]


@contextmanager
def serving(
    limit: Path | None = None, trap: Path | None = None, **overrides: object
) -> Iterator[Service]:
    """Run a service with a new engine.

    Args:
        limit, trap, overrides: see ``kept_service.py``.
    """
    # On a busy machine, a long time may pass between two requests on one connection.
    keys = {"serve.keep_alive_s": 2 * WAIT_S, **overrides}
    engine = FakeEngine(by_position, step_s=0.01)
    command = [sys.executable, "-m", "tests.serve.kept_service", engine.address.file.url]
    process = subprocess.Popen(
        [*command, str(limit or ""), str(trap or ""), json.dumps(keys)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        service = Service(process, int(process.stdout.readline()), engine)
        until(lambda: status_of(service) == 200, WAIT_S)
        yield service
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            engine.close()


def status_of(service: Service) -> int:
    with service.connect() as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        return status_on(client)


def status_on(client: socket.socket) -> int:
    """Read one short response; return its status code."""
    text = b""
    while not text.endswith(b"}"):
        more = client.recv(1 << 16)
        assert more, "the connection ended"
        text += more
    return int(text.split()[1])


def post(path: str, headers: str = HEADERS, version: str = "1.1", **body: Any) -> bytes:
    data = json.dumps({"model": "tiny-qwen3", **body}).encode()
    head = f"POST /v1/{path} HTTP/{version}\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


MESSAGES = [{"role": "user", "content": "how are you"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
KINDS = {
    "chat": post("chat/completions", messages=MESSAGES, stream=True, max_tokens=150),
    "whole": post("chat/completions", messages=MESSAGES, max_tokens=150),
    "choices": post(
        "chat/completions", messages=MESSAGES, stream=True, max_tokens=120, n=3, seed=5
    ),
    "reports": post(
        "chat/completions", messages=MESSAGES, stream=True, max_tokens=150, logprobs=True,
        top_logprobs=3,
    ),
    "response": post("responses", input="how are you", stream=True, max_output_tokens=150),
    "message": post("messages", messages=MESSAGES, stream=True, max_tokens=150),
    "usage": post(
        "completions", prompt="a b c", stream=True, max_tokens=150, stream_options=USAGE, echo=True
    ),
    "echoes": post(
        "completions", prompt="a b c", stream=True, max_tokens=120, echo=True, logprobs=1, n=2,
        seed=5,
    ),
    "prompts": post("completions", prompt=["a b", "c d e"], stream=True, max_tokens=150),
    "stop": post("completions", prompt="a", stream=True, max_tokens=200, stop=["}~"]),
    "old": post("completions", version="1.0", prompt="a b c", stream=True, max_tokens=150),
    "closes": post(
        "completions", HEADERS + "Connection: close\r\n", prompt="a", stream=True, max_tokens=150
    ),
}  # fmt: skip


LONG = post("completions", prompt="a", stream=True, max_tokens=1500)
