"""Streams of requests that run while groups are added and removed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.actors.leftovers import wait_until
from tests.checkpoints import make_prompts
from tests.deployments import Answer, Serving, greedy_params

NUM_STREAMS = 12
TOKENS = 40
PROMPTS = make_prompts([20, 7, 33, 12])
GRAPH = {"sizes": [4, 12]}


@dataclass
class Streams:
    """Several streams. Each stream sends one request after another, and cycles through the prompts.

    Attributes:
        ended: (index of the prompt, answer) of each completed request.
    """

    service: Serving
    ended: list[tuple[int, Answer]] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, first: int) -> None:
        for number in itertools.count():
            if self._stopping.is_set():
                return
            which = (first + number) % len(PROMPTS)
            name = f"stream{first}-{number}"
            answer = self.service.submit(name, PROMPTS[which], greedy_params(TOKENS))
            assert answer.ended.wait(120), "no answer"
            self.ended.append((which, answer))
            self._stopping.wait(0.1)  # leaves processor time to the processes that start or stop

    def stop(self) -> None:
        self._stopping.set()


@contextmanager
def streams(service: Serving, count: int = NUM_STREAMS) -> Iterator[Streams]:
    """Run ``count`` streams within this context; end all of them when the context ends."""
    found = Streams(service)
    threads = [threading.Thread(target=found.run, args=[i], daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(found.ended) >= count // 2, "the streams do not run")
        yield found
    finally:
        found.stop()
        for thread in threads:
            thread.join(120)


def assert_all_equal(found: Streams, wanted: list[list[int]]) -> None:
    assert [answer.error for _, answer in found.ended if answer.error] == []
    for which, answer in found.ended:
        assert answer.tokens == wanted[which]


def pids_of(service: Serving) -> list[int]:
    report = service.report()
    return [rank["pid"] for group in (report, *report["groups"]) for rank in group["ranks"]]


def names_of(service: Serving) -> set[str]:
    return set(service.client.query("metrics"))
