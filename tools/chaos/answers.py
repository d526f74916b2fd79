"""The answers that clients received, and functions that evaluate these answers. This module uses no
sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

OK, BUSY = 200, (429, 503)


@dataclass
class Answer:
    """The answer that a client received for one request. Only one thread writes to it.

    Attributes:
        body: index of the request's body. Requests with the same body must get the same text.
        status: HTTP status of the response; 0 if there was no response.
        retry_after: whether the response has a Retry-After header.
        num_tokens: number of tokens, which the service reports at the end of the answer.
        times_s: the time at which each delta arrived.
        given_up: whether the client disconnected on purpose.
    """

    body: int
    text: str = ""
    status: int = 0
    retry_after: bool = False
    finish_reason: str | None = None
    num_tokens: int | None = None
    error: str = ""
    times_s: list[float] = field(default_factory=list)
    given_up: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether the service refused the request because all its slots were used."""
        return self.status in BUSY and self.retry_after

    @property
    def is_whole(self) -> bool:
        return self.status == OK and self.finish_reason is not None and not self.error

    @property
    def is_lost(self) -> bool:
        """Whether an expected answer is missing."""
        return not (self.is_whole or self.is_refused or self.given_up)

    def differs(self, wanted: Answer) -> bool:
        """Whether the tokens differ from the tokens of ``wanted``, the answer in a run without
        faults.

        An incomplete answer must be a prefix of the answer without faults.
        """
        if not self.is_whole:
            return not wanted.text.startswith(self.text)
        return (self.text, self.finish_reason, self.num_tokens) != (
            wanted.text,
            wanted.finish_reason,
            wanted.num_tokens,
        )


@dataclass(frozen=True)
class Pause:
    """An interval in which no delta arrived. Times are in seconds, on the same clock as the times
    of deltas.
    """

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def longest_pause(times_s: Sequence[float], struck_s: float) -> Pause | None:
    """Return the longest interval without a delta, among the intervals that ended after
    ``struck_s``.
    """
    found = [Pause(a, b) for a, b in pairwise(sorted(times_s)) if b > struck_s]
    return max(found, key=lambda pause: pause.length_s, default=None)


def first_after(times_s: Sequence[float], at_s: float) -> float | None:
    """Return the time of the first delta after the given time, or None."""
    return min((t for t in times_s if t > at_s), default=None)


def count_different(answers: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """Compare each answer with the answer in ``wanted`` for the same body. Count the answers whose
    tokens differ.
    """
    return sum(answer.differs(wanted[answer.body]) for answer in answers)
