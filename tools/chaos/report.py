"""The table of ``make chaos``. A line of the table summarises all strikes with the same kind of
fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tools.chaos.outcome import Outcome

COLUMNS = (
    "fault",
    "tried",
    "requests",
    "lost",
    "refused",
    "differ",
    "not ready, s",
    "new tokens, s",
    "longest pause, s",
    "all serve, s",
    "ended",
    "left behind",
)
TOTAL = "all"


def lines_of(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """Yield a line for each kind of fault, in the order in which the kinds first occurred, and then
    a line for all kinds.

    Each time in a line is the maximum over the strikes that the line summarises.
    """
    names = list(dict.fromkeys(str(outcome.strike.fault) for outcome in outcomes))
    for name in names:
        yield _line(name, [o for o in outcomes if str(o.strike.fault) == name])
    yield _line(TOTAL, outcomes)


def _line(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    counts = [
        len(outcomes),
        sum(o.tried for o in outcomes),
        sum(o.lost for o in outcomes),
        sum(o.refused for o in outcomes),
        sum(o.different for o in outcomes),
    ]
    seconds = [
        _worst(o.unready_s for o in outcomes),
        _worst(o.new_tokens_s for o in outcomes),
        _worst(o.pause_s for o in outcomes),
        _worst(o.recovered_s for o in outcomes),
    ]
    ended = sum(o.exit_code is not None for o in outcomes)
    left = dict.fromkeys(thing for o in outcomes for thing in o.left)
    return [name, *map(str, counts), *seconds, str(ended), "; ".join(left) or "nothing"]


def _worst(seconds: Iterable[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f"{max(known):.1f}" if known else "-"


def sentence_of(outcome: Outcome) -> str:
    """Describe the result of a strike in one line."""
    told = {
        "not ready": outcome.unready_s,
        "new tokens": outcome.new_tokens_s,
        "longest pause": outcome.pause_s,
        "all serve": outcome.recovered_s,
    }
    parts = [
        f"{outcome.lost} of {outcome.tried} requests lost",
        *([f"{outcome.refused} refused"] if outcome.refused else []),
        *([f"{outcome.different} differ"] if outcome.different else []),
        *(f"{name} {seconds:.1f} s" for name, seconds in told.items() if seconds is not None),
        *([f"the service ended with {outcome.exit_code}"] if outcome.exit_code is not None else []),
        *([f"left behind: {', '.join(outcome.left)}"] if outcome.left else []),
        *([f"told: {outcome.error}"] if outcome.error else []),
        *([f"the service said: {outcome.said}"] if outcome.said else []),
    ]
    return f"{outcome.strike}: {'; '.join(parts)}"
