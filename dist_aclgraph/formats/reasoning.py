"""Reasoning between two markers, before the answer itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from dist_aclgraph.formats.events import CallBegin
from dist_aclgraph.formats.scanner import Scan, Scanner

Read = Callable[[Scanner], Scan[None]]


@dataclass(frozen=True)
class Thought:
    """The markers of a family's reasoning."""

    begin: str
    end: str


# The markers of each family. The chat template of a checkpoint contains the markers of its family.
THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("<seed:think>", "</seed:think>"),
    Thought("[THINK]", "[/THINK]"),
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),
    Thought("<|inner_prefix|>", "<|inner_suffix|>"),
    Thought("<think:opensource>", "</think:opensource>"),
)


def find_thought(template: str) -> Thought | None:
    """Return the markers of reasoning that a chat template contains; None if there are no markers.

    Some templates contain only the begin marker: the prompt opens the reasoning, and the model
    writes the end marker.
    """
    closed = (each for each in THOUGHTS if each.end in template)
    opened = (each for each in THOUGHTS if each.begin in template)
    return next(closed, None) or next(opened, None)


@dataclass(frozen=True)
class CallsInThought:
    """The calls that end the reasoning if the model has not written the end marker. Models often
    omit this marker before a call.

    Attributes:
        begins: the markers that begin calls. Only a marker that is a token can end the reasoning.
        names: names of the request's tools. A call of any other tool is a part of the reasoning.
        read: a function that reads the content and calls of an answer.
    """

    begins: Sequence[str]
    names: Container[str]
    read: Read


def read_thought(
    scanner: Scanner,
    thought: Thought,
    read_answer: Read,
    *,
    is_open: bool,
    calls: CallsInThought | None = None,
) -> Scan[None]:
    """Read reasoning, if there is any, and then the answer.

    Args:
        is_open: whether the prompt has already opened the reasoning. If true, the answer needs no
            begin marker.
        calls: the calls that end the reasoning if its end marker is missing. An end marker after
            such a call is left out.
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
        begins = () if calls is None else calls.begins
        tokens = [code for text in begins if (code := scanner.coded(text)) != text]
        marker = yield from scanner.copy_until([end, *tokens], scanner.reasoning)
        while calls is not None and marker in tokens:
            if (yield from _begins_call(scanner, marker, calls)):
                break
            scanner.reasoning(marker)
            marker = yield from scanner.copy_until([end, *tokens], scanner.reasoning)
        if marker is None:
            return
        scanner.end_reasoning()
        if marker != end:
            scanner.left_out = (end,)
            scanner.unread(marker)
    else:
        scanner.unread(scanner.give_back())
    yield from _skip_ends(scanner, end)
    yield from read_answer(scanner)


def _skip_ends(scanner: Scanner, end: str) -> Scan[None]:
    """Leave out further end markers before the answer. Some models write two end markers, or an end
    marker without a begin marker.
    """
    while True:
        scanner.keep()
        yield from scanner.skip_space()
        if not (yield from scanner.match(end)):
            scanner.unread(scanner.give_back())
            return
        scanner.let_go()
        scanner.end_reasoning()


def _begins_call(scanner: Scanner, marker: str, calls: CallsInThought) -> Scan[bool]:
    """Return whether the marker that was read last begins a call of one of the request's tools. The
    scanner then continues directly after the marker.
    """
    trial = scanner.trial()
    trial.feed(marker)
    reading = calls.read(trial)
    next(reading)
    text = ""
    while not (events := trial.take_events()) and (sign := (yield from scanner.peek())):
        yield from scanner.match(sign)
        text += sign
        trial.feed(sign)
        next(reading)
    scanner.unread(text)
    first = events[0] if events else None
    return isinstance(first, CallBegin) and first.name in calls.names
