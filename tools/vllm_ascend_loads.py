"""The loads of ``make bench-vllm-ascend``: streamed completions over HTTP, read by one thread."""

from __future__ import annotations

import json
import random
import selectors
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from math import inf

from benchmarks.processes.serve_client import make_request

MODEL = "model"  # the model's name in the API of each server
# With the modelled device, each token has id 0. The tokenizer converts id 0 to this text.
TOKEN = b"<|endoftext|>"
FIRST_ID, NUM_IDS = 3, 800  # the token ids of prompts
SILENCE_S = 120.0
STREAMS, BURST, PROMPT, BURST_TOKENS = 16, 32, 32, 32
# Output tokens of each decoding stream in the loads ``join`` and ``prompts``.
JOIN_TOKENS, LONG_TOKENS = 200, 400
SETTLED = 8  # number of tokens that each stream gets before other requests arrive
LONG_PROMPTS = (2048, 4096, 3072, 2560, 3584, 4096, 2048, 3072)
MIXED, MIXED_GAP_S = 64, 0.04
MIXED_PROMPT, MIXED_TOKENS = (16, 512), (16, 128)
NUM_ALONE = 8
STEADY, STEADY_TOKENS = 192, 128

Times = dict[str, list[float]]  # times in ms, by the names of measured quantities


class Stream:
    """One streamed completion.

    Attributes:
        times_s: the times at which frames with tokens were read.
        num_missing: number of tokens that were not read yet.
    """

    def __init__(self, port: int, prompt: list[int], max_tokens: int) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        self.times_s: list[float] = []
        self.num_missing, self._rest = max_tokens, b""
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.sent_s = time.monotonic()
        self.connection.sendall(make_request("/v1/completions", json.dumps(body).encode()))

    def read(self) -> bool:
        """Read what has arrived; return whether the reply is complete.

        Raises:
            RuntimeError: the reply ended too early; the message contains the reply's last bytes.
        """
        data, now_s = self.connection.recv(1 << 16), time.monotonic()
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            if count := frame.count(TOKEN):
                self.num_missing -= count
                self.times_s.append(now_s)
        if not data and self.num_missing:
            raise RuntimeError(f"{self.num_missing} tokens are missing after {self._rest[-500:]!r}")
        return not data

    @property
    def first_ms(self) -> float:
        return (self.times_s[0] - self.sent_s) * 1e3

    def gaps_ms(self, start_s: float = 0.0, end_s: float = inf) -> list[float]:
        """Return, in ms, each gap between successive frames that overlaps the given period."""
        pairs = pairwise(self.times_s)
        return [(after - before) * 1e3 for before, after in pairs
                if after >= start_s and before <= end_s]  # fmt: skip


class Client:
    """Sends requests to the server at ``port``, and reads all replies."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self.random = port, random.Random(seed)
        self._open = selectors.DefaultSelector()
        self.streams: list[Stream] = []

    def send(self, count: int, length: int, max_tokens: int) -> list[Stream]:
        """Send requests at once, with random prompts of ``length`` tokens."""
        sent = []
        for _ in range(count):
            ids = [FIRST_ID + self.random.randrange(NUM_IDS) for _ in range(length)]
            stream = Stream(self._port, ids, max_tokens)
            self._open.register(stream.connection, selectors.EVENT_READ, stream)
            sent.append(stream)
        self.streams += sent
        return sent

    @property
    def num_open(self) -> int:
        """Number of replies that are not complete."""
        return len(self._open.get_map())

    def finish(self) -> None:
        """Read until all replies are complete."""
        self.read_until(lambda: not self.num_open)

    def read_until(self, is_reached: Callable[[], bool]) -> None:
        """Read until ``is_reached`` returns True.

        Raises:
            TimeoutError: the server sent nothing for ``SILENCE_S``.
        """
        while not is_reached():
            if not self._read(SILENCE_S):
                raise TimeoutError(f"port {self._port} sent nothing for {SILENCE_S:g} s")

    def pause(self, seconds: float) -> None:
        """Read for a time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._read(left_s)

    def _read(self, limit_s: float) -> bool:
        ready = self._open.select(limit_s)
        for key, _ in ready:
            stream: Stream = key.data
            if stream.read():
                self._open.unregister(stream.connection)
                stream.connection.close()
        return bool(ready)

    def start_streams(self, max_tokens: int) -> list[Stream]:
        """Start the streams that decode while other requests arrive; return when all streams have
        tokens.
        """
        streams = self.send(STREAMS, PROMPT, max_tokens)
        self.read_until(lambda: all(len(stream.times_s) >= SETTLED for stream in streams))
        return streams


def alone(client: Client) -> Times:
    """One request after the other."""
    for _ in range(NUM_ALONE):
        client.send(1, PROMPT, 4)
        client.finish()
        client.pause(client.random.uniform(0.02, 0.05))
    return {"first": [stream.first_ms for stream in client.streams]}


def burst(client: Client) -> Times:
    """Requests that arrive together, while no other request runs."""
    start_s = time.monotonic()
    client.send(BURST, PROMPT, BURST_TOKENS)
    client.finish()
    return _measured(client.streams, client.streams, start_s)


def join(client: Client) -> Times:
    """Requests that arrive together, while other requests decode."""
    decoding = client.start_streams(JOIN_TOKENS)
    client.pause(client.random.uniform(0.0, 0.05))
    start_s = time.monotonic()
    joining = client.send(BURST, PROMPT, BURST_TOKENS)
    client.read_until(lambda: not any(stream.num_missing for stream in joining))
    found = _measured(joining, decoding, start_s)
    client.finish()
    return found


def prompts(client: Client) -> Times:
    """Long prompts, one after the other, while other requests decode."""
    decoding = client.start_streams(LONG_TOKENS)
    start_s, computed = time.monotonic(), []
    for length in LONG_PROMPTS:
        (one,) = client.send(1, length, 2)
        computed.append(one)
        client.read_until(lambda one=one: not one.num_missing)  # type: ignore[misc]
        client.pause(client.random.uniform(0.02, 0.05))
    found = _measured(computed, decoding, start_s)
    client.finish()
    return found


def mixed(client: Client) -> Times:
    """Requests of several lengths, at equal intervals."""
    start_s = time.monotonic()
    for index in range(1, MIXED + 1):
        client.send(1, client.random.randint(*MIXED_PROMPT), client.random.randint(*MIXED_TOKENS))
        client.pause(start_s + MIXED_GAP_S * index - time.monotonic())
    client.finish()
    return _measured(client.streams, client.streams, start_s)


def steady(client: Client) -> Times:
    """Keep the number of open requests at ``BURST``: when a request ends, send another request."""
    start_s = time.monotonic()
    while (num_left := STEADY - len(client.streams)) > 0:
        client.send(min(num_left, BURST - client.num_open), PROMPT, STEADY_TOKENS)
        client.read_until(lambda: client.num_open < BURST)
    client.finish()
    return _measured(client.streams, client.streams, start_s)


def _measured(new: list[Stream], decoding: list[Stream], start_s: float) -> Times:
    end_s = time.monotonic()
    return {
        "first": [stream.first_ms for stream in new],
        "gap": [gap for stream in decoding for gap in stream.gaps_ms(start_s, end_s)],
        "total": [(end_s - start_s) * 1e3],
    }


LOADS: dict[str, Callable[[Client], Times]] = {
    "alone": alone,
    "burst": burst,
    "join": join,
    "long prompts": prompts,
    "mixed": mixed,
    "steady": steady,
}
