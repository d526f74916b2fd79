"""What clients saw of their answers, and what may be concluded from it. Knows no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

OK, BUSY = 200, (429, 503)


@dataclass
class Answer:
    """One request's answer, as it came. One thread writes it.

    Attributes:
        body: which request it answers; equal ones must get equal texts.
        status: of HTTP, 0 where none came.
        retry_after: whether the refusal said when to come again.
        num_tokens: as the service counted them in the end.
        times_s: when each delta came.
        given_up: its client went away by itself.
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
        """Whether the service said, before it had begun, that it has no room."""
        return self.status in BUSY and self.retry_after

    @property
    def is_whole(self) -> bool:
        return self.status == OK and self.finish_reason is not None and not self.error

    @property
    def is_lost(self) -> bool:
        """Whether an answer was owed and did not come."""
        return not (self.is_whole or self.is_refused or self.given_up)

    def differs(self, wanted: Answer) -> bool:
        """Whether it has other tokens than the one of a run without faults.

        Of an answer that was not to the end, what there is must be how that one begins.
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
    """A time without a delta. Seconds, on the clock of the deltas."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def longest_pause(times_s: Sequence[float], struck_s: float) -> Pause | None:
    """Return the longest time without a delta that ended after ``struck_s``, None if none did."""
    found = [Pause(a, b) for a, b in pairwise(sorted(times_s)) if b > struck_s]
    return max(found, key=lambda pause: pause.length_s, default=None)


def first_after(times_s: Sequence[float], at_s: float) -> float | None:
    """Return when the next delta came, None where none did."""
    return min((t for t in times_s if t > at_s), default=None)


def count_different(answers: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """Count answers with other tokens than ``wanted`` has for their bodies."""
    return sum(answer.differs(wanted[answer.body]) for answer in answers)
