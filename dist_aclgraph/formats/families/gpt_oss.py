"""gpt-oss (harmony): an answer is a sequence of messages on channels.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

``analysis`` is reasoning. A message to a function is a call. The model also writes messages to
built-in tools, such as ``python``. If the request has a tool with the name of the built-in tool,
such a message is a call; otherwise it is reasoning. All other messages are content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from dist_aclgraph.formats.lark import ANY_TEXT, Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
BEGINS = ()  # empty: the head of a message, not its text, says whether the message is a call
_RECIPIENT = re.compile(r"to=(?P<function>functions\.)?(?P<name>[^\s<]+)")
NOBODY = ("assistant", "user", "all")  # names of recipients that are not tools


def fits(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    scanned = [scanner.coded(marker) for marker in MARKERS]
    start, end, message, channel_begin, constrain, returned, call = scanned
    ends = (end, call, returned, start)
    has_thought = False
    while (yield from scanner.peek()):
        scanner.keep()
        head, marker = yield from scanner.read_head([message, *ends])
        if marker != message:
            text = scanner.give_back(marker or "")
            found = _head(channel_begin, constrain).match(text)
            rest = "" if found is None else text[found.end() :]
            is_tool = found is not None and "to=" in found[0]
            if found is not None and marker is None and not (yield from scanner.peek()):
                is_cut = "{" not in rest if is_tool else any(m.startswith(rest) for m in scanned)
                if is_cut:  # the answer ends within a message's head
                    return
            if found is None or (is_tool and rest[:1] not in ("{", "")):
                if text.strip():  # white space between two messages is left out
                    scanner.content(text)
                if marker is None:
                    yield from scanner.copy_until(ends, scanner.content)
                continue
            head = found[0]  # models can omit the marker after the head
            scanner.unread(rest + (marker or ""))
        else:
            scanner.let_go()
        shown = scanner.shown(head)
        channel = shown.rpartition(CHANNEL)[2].strip()
        recipients = [each for each in _RECIPIENT.finditer(shown) if each["name"] not in NOBODY]
        recipient = recipients[-1] if recipients else None
        if recipient and tools and (recipient["function"] or recipient["name"] in tools):
            scanner.begin_call(recipient["name"])
            yield from scanner.skip_space()
            if (marker := (yield from scanner.match(*ends))) is not None:
                scanner.arguments("{}")
            else:
                if (yield from scanner.peek()) == "{":
                    yield from scanner.copy_json(scanner.arguments)
                marker = yield from scanner.copy_until(ends, scanner.arguments, in_call=True)
            if marker is not None:
                scanner.end_call()
        elif recipient or channel.startswith("analysis"):
            yield from scanner.begin_reasoning()
            if has_thought:  # separates two messages of reasoning
                scanner.reasoning("\n")
            has_thought = True
            if (yield from scanner.copy_until(ends, scanner.reasoning)) is not None:
                scanner.end_reasoning()
        else:
            yield from scanner.copy_until(ends, scanner.content)


@cache
def _head(channel: str, constrain: str) -> re.Pattern[str]:
    """Return a pattern for the head of a message: a role, a channel, a recipient, and the type of
    the message's text.
    """
    return re.compile(
        rf"(?:assistant)?\s*(?:to=\S+?\s*)?{re.escape(channel)}\s*[a-z]+"
        rf"(?:\s+to=[^\s<{{\ud800-\udfff]+)?\s*(?:{re.escape(constrain)}\s*[a-z]*)?\s*"
    )


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}")
    return f"{head} {lark.arguments(schema)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    """Return an expression for one call; the token that ends the call also ends the answer."""
    return f"{lark_thought(lark)} {call}"


def lark_text(lark: Lark, tools: Tools) -> str:
    return lark.rule(ANY_TEXT)


def lark_thought(lark: Lark) -> str:
    """Return an expression for any number of messages of reasoning, before the last message."""
    head, end = lark.text(f"{CHANNEL}analysis{MESSAGE}"), lark.text(f"{END}{START}assistant")
    return f"({head} {ANY_TEXT} {end})?"


def lark_final(lark: Lark, form: str) -> str:
    """Return an expression for an answer whose last message has the output format ``form``."""
    return f"{lark_thought(lark)} {lark.text(f'{CHANNEL}final{MESSAGE}')} {form}"
