"""Reasoning between two markers, before the answer itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_aclgraph.formats.scanner import Scan, Scanner


@dataclass(frozen=True)
class Thought:
    """The markers of a family's reasoning."""

    begin: str
    end: str


# The template of a family contains the markers of this family.
THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("<seed:think>", "</seed:think>"),
    Thought("[THINK]", "[/THINK]"),
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),
    Thought("<|inner_prefix|>", "<|inner_suffix|>"),
)


def find_thought(template: str) -> Thought | None:
    """Return the markers of reasoning that a chat template contains; None without markers.

    Some templates contain only the begin marker, because they only open the answer's reasoning.
    """
    closed = (each for each in THOUGHTS if each.end in template)
    opened = (each for each in THOUGHTS if each.begin in template)
    return next(closed, None) or next(opened, None)


def read_thought(
    scanner: Scanner,
    thought: Thought,
    read_answer: Callable[[Scanner], Scan[None]],
    *,
    is_open: bool,
    calls: Sequence[str] = (),
) -> Scan[None]:
    """Read reasoning, if there is any, and then the answer.

    Args:
        is_open: whether the prompt has already opened the reasoning. Then only the marker that ends
            the reasoning is necessary.
        calls: markers of calls that also end the reasoning if they are tokens. If the usual end
            marker of the reasoning follows later, it is left out.
    """
    begin, end = scanner.coded(thought.begin), scanner.coded(thought.end)
    scanner.keep()
    yield from scanner.skip_space()
    is_opened = (yield from scanner.match(begin)) is not None
    if is_opened or is_open:
        if is_opened:
            scanner.let_go()
        else:
            scanner.reasoning(scanner.give_back().lstrip("\n"))
        yield from scanner.begin_reasoning()
        tokens = [code for text in calls if (code := scanner.coded(text)) != text]
        marker = yield from scanner.copy_until([end, *tokens], scanner.reasoning)
        if marker is None:
            return
        scanner.end_reasoning()
        if marker != end:
            scanner.left_out = (end,)
            scanner.unread(marker)
    else:
        scanner.unread(scanner.give_back())
    yield from read_answer(scanner)
