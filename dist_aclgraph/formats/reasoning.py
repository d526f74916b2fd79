"""Reasoning between two markers, before the answer itself."""

from __future__ import annotations

from collections.abc import Callable
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
    Thought("<|inner_prefix|>", "<|inner_suffix|>"),
)


def find_thought(template: str) -> Thought | None:
    """Return the markers of reasoning that a chat template contains; None without markers."""
    return next((each for each in THOUGHTS if each.end in template), None)


def read_thought(
    scanner: Scanner,
    thought: Thought,
    read_answer: Callable[[Scanner], Scan[None]],
    *,
    is_open: bool,
) -> Scan[None]:
    """Read reasoning, if there is any, and then the answer.

    Args:
        is_open: whether the prompt has already opened the reasoning. Then only the marker that ends
            the reasoning is necessary.
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
        if (yield from scanner.copy_until([end], scanner.reasoning)) is None:
            return
        scanner.end_reasoning()
    else:
        scanner.content(scanner.give_back())
    yield from read_answer(scanner)
