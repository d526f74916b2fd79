"""Computes the outcome of a strike, which is an injected fault, from what clients and watchers have
observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.chaos.answers import (
    Answer,
    count_different,
    first_after,
    longest_pause,
)
from tools.chaos.plan import Strike


@dataclass(frozen=True)
class Sight:
    """One poll of ``/ready``.

    Attributes:
        at_s: time of the poll.
        serving: number of groups that accepted requests; 0 if the service did not answer.
    """

    at_s: float
    serving: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of one strike. Times are in seconds since the strike. A time is None if its event
    did not happen.

    Attributes:
        tried: number of requests that were sent.
        lost: number of requests that were accepted, but got no complete answer.
        refused: number of requests that were refused with status 429 or 503, and Retry-After.
        unready_s: time until ``/ready`` reported fewer groups.
        new_tokens_s: time until each stream has received at least one delta since the service
            noticed the fault.
        pause_s: the longest interval in which a stream received no delta.
        recovered_s: time until all groups served again.
        exit_code: exit code of the service, if it ended.
        left: files and processes that still exist, but should have disappeared.
        error: error of the first lost request.
        said: the last output line of the service, if it has ended.
    """

    strike: Strike
    tried: int
    lost: int
    refused: int
    different: int
    unready_s: float | None
    new_tokens_s: float | None
    pause_s: float | None
    recovered_s: float | None
    exit_code: int | None
    left: tuple[str, ...]
    error: str
    said: str

    @property
    def is_good(self) -> bool:
        """Whether all answers are right, no request is lost, no files or processes are left, and
        the service runs.
        """
        return not (self.lost or self.different or self.left) and self.exit_code is None


def judge(
    strike: Strike,
    answers: Sequence[Answer],
    wanted: Sequence[Answer],
    sights: Sequence[Sight],
    *,
    struck_s: float,
    num_groups: int,
    recovered_s: float | None,
    exit_code: int | None,
    left: Sequence[str],
    said: str,
) -> Outcome:
    """Return the outcome of a strike.

    Args:
        wanted: the answers in a run without faults. ``Answer.body`` is the index in this list.
        struck_s: the time of the strike, on the same clock as ``recovered_s``.
    """
    known_s = first_without(sights, struck_s, num_groups)
    news = [] if known_s is None else [first_after(a.times_s, known_s) for a in answers]
    pauses = [longest_pause(answer.times_s, struck_s) for answer in answers]
    lost = [answer for answer in answers if answer.is_lost]
    return Outcome(
        strike,
        tried=len(answers),
        lost=len(lost),
        refused=sum(answer.is_refused for answer in answers),
        different=count_different(answers, wanted),
        unready_s=None if known_s is None else known_s - struck_s,
        new_tokens_s=max((at_s - struck_s for at_s in news if at_s), default=None),
        pause_s=max((pause.length_s for pause in pauses if pause), default=None),
        recovered_s=None if recovered_s is None or known_s is None else recovered_s - struck_s,
        exit_code=exit_code,
        left=tuple(left),
        said=said,
        error=next((a.error or f"HTTP {a.status}, not to the end" for a in lost), ""),
    )


def first_without(sights: Sequence[Sight], struck_s: float, num_groups: int) -> float | None:
    """Return the first time after a strike at which at least one group did not serve."""
    seen = (s.at_s for s in sights if s.at_s >= struck_s and s.serving < num_groups)
    return min(seen, default=None)
