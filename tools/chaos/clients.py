"""Clients that stream answers at the same time, and count deltas. Each client has a thread."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from tools.chaos.answers import OK, Answer

PATH = "/v1/completions"
TIMEOUT_S = 400.0  # time limit between two bytes; longer than a request may wait for a group
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # httpx needs an SSL context even without TLS
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]

BeforeDelta = Callable[[Answer], None]


class Hangup(Exception):
    """A ``before_delta`` function raises this to make its client disconnect."""


class Clients:
    """Sends all requests at the same time. Owns the answers, and counts the deltas.

    Args:
        bodies: the bodies of the requests. ``Answer.body`` is an index in this list.
        before_delta: a function that is called on the client's thread before the client reads a
            delta. It may wait, or raise Hangup.
    """

    def __init__(
        self,
        url: str,
        bodies: Mapping[int, dict[str, Any]],
        *,
        copies: int = 1,
        before_delta: BeforeDelta = lambda answer: None,
        has_small_buffer: bool = False,
    ) -> None:
        self.answers = [Answer(i) for _ in range(copies) for i in bodies]
        self._bodies = bodies
        self._before_delta = before_delta
        self._seen = threading.Condition()
        self._num_deltas = 0
        self._num_running = len(self.answers)
        self._url = url + PATH
        self._options = SMALL_BUFFER if has_small_buffer else []
        self._threads = [
            threading.Thread(target=self._ask, args=[answer], daemon=True)
            for answer in self.answers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_deltas(self, count: int, timeout_s: float) -> bool:
        """Wait for ``count`` deltas. Return whether they arrived before the timeout and before the
        end of all answers.
        """
        with self._seen:
            self._seen.wait_for(
                lambda: self._num_deltas >= count or not self._num_running, timeout_s
            )
            return self._num_deltas >= count

    def join(self, timeout_s: float) -> bool:
        """Wait for the ends of all answers. Return whether all answers have ended in time."""
        with self._seen:
            return self._seen.wait_for(lambda: not self._num_running, timeout_s)

    def _client(self) -> httpx.Client:
        """Return an HTTP client that only one thread uses.

        A shared client might close a connection while another thread reads from it.
        """
        transport = httpx.HTTPTransport(verify=NO_TLS, socket_options=self._options)
        return httpx.Client(transport=transport, timeout=TIMEOUT_S)

    def _ask(self, answer: Answer) -> None:
        try:
            with (
                self._client() as http,
                http.stream("POST", self._url, json=self._bodies[answer.body]) as reply,
            ):
                answer.status = reply.status_code
                answer.retry_after = "retry-after" in reply.headers
                if reply.status_code == OK:
                    self._read(answer, reply.iter_lines())
                else:
                    answer.error = reply.read().decode(errors="replace")
        except Hangup:
            answer.given_up = True
        except (httpx.HTTPError, ValueError, KeyError, RuntimeError) as e:
            answer.error = repr(e)
        finally:
            with self._seen:
                self._num_running -= 1
                self._seen.notify_all()

    def _read(self, answer: Answer, lines: Iterator[str]) -> None:
        self._before_delta(answer)
        for line in lines:
            if not line.startswith("data: {"):
                continue
            found = json.loads(line.removeprefix("data: "))
            if "error" in found:
                answer.error = found["error"]["message"]
                return
            if found.get("usage"):
                answer.num_tokens = found["usage"]["completion_tokens"]
            for choice in found["choices"]:
                answer.text += choice["text"]
                answer.finish_reason = choice["finish_reason"]
                answer.times_s.append(time.monotonic())
                self._count()
            self._before_delta(answer)

    def _count(self) -> None:
        with self._seen:
            self._num_deltas += 1
            self._seen.notify_all()
