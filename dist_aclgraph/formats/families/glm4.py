"""GLM-4 and GLM-Z1: a call is a line with the name, then the arguments as JSON.

    f
    {"k": "v"}<|assistant|>g
    {}

A line is a call only if it is the name of a given tool. The token ``<|assistant|>`` begins a
further call. The sources are the parser for GLM-4 in ms-swift, and the chat template of GLM-Z1, in
which the name of a call is the ``metadata`` of a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments
from dist_aclgraph.formats.lark import SPACE, Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

NEXT = "<|assistant|>"
MARKERS = (NEXT,)
BEGINS = ()  # no marker begins a call


def fits(template: str) -> bool:
    return all(text in template for text in ("[gMASK]", "metadata", "tools"))


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    following = scanner.coded(NEXT)
    marker: str | None = ""  # the marker before the line; empty if no marker precedes the line
    while marker is not None:
        scanner.keep()
        if (yield from _begins_call(scanner, tools)):
            if (yield from copy_arguments(scanner)):
                scanner.end_call()
            scanner.content((yield from scanner.skip_space()))
            marker = (yield from scanner.match(following)) or ""
            if marker or (yield from scanner.peek()):
                continue
        else:
            text = scanner.give_back()
            scanner.content(marker + text)
            if text.endswith("\n"):  # the next line may be a call
                marker = ""
                continue
        marker = yield from scanner.copy_until(["\n", following], scanner.content)
        if marker == "\n":
            scanner.content(marker)
            marker = ""


def _begins_call(scanner: Scanner, tools: Tools) -> Scan[bool]:
    """Read the line with a tool's name and the white space before the arguments, and begin the
    call. Return whether a call has begun. If no call has begun, the scanner still keeps the text
    that was read.
    """
    name = yield from scanner.match(*tools)
    if name is None:
        return False
    while (yield from scanner.match(" ", "\t")):
        pass
    if not (yield from scanner.match("\n")):
        return False
    yield from scanner.skip_space()
    if not (yield from scanner.match("{")):
        return False
    space = yield from scanner.skip_space()
    if (yield from scanner.peek()) not in ('"', "}"):
        return False
    scanner.let_go()
    scanner.unread("{" + space)
    scanner.begin_call(name)
    return True


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    return f"{lark.text(name + chr(10))} {lark.arguments(schema)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return f"{call} ({lark.text(NEXT)} {call})*" if several else call


def lark_text(lark: Lark, tools: Tools) -> str:
    names = "|".join(map(re.escape, tools))
    before = rf"((.|\n)*(\n|{re.escape(NEXT)}))?"
    return lark.text_without(rf"{before}({names})[ \t]*\n{SPACE}*\{{(.|\n)*")
