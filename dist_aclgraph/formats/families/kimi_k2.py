"""Kimi K2: a call's id, ``functions.f:0``, contains the tool's name; the arguments are JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
BEGINS = (SECTION, CALL)
MARKERS = (SECTION, END_SECTION, CALL, END_CALL, ARGUMENTS)


def fits(template: str) -> bool:
    return SECTION in template or CALL in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    section, end_section, call, end_call, begin = map(scanner.coded, MARKERS)
    outside = (section, end_section, call)
    marker = yield from scanner.copy_until(outside, scanner.content)
    while marker is not None:
        if marker == call:
            scanner.keep()
            call_id, marker = yield from scanner.read_head([begin, *outside, end_call])
            call_id = call_id.strip()
            name = call_id.removeprefix("functions.").rsplit(":", 1)[0]
            if marker in outside:  # the call's arguments are missing
                scanner.content(call + scanner.give_back(marker))
                continue
            if marker != begin or not name:
                scanner.content(call + scanner.give_back())
            else:
                scanner.let_go()
                scanner.begin_call(name, call_id)
                yield from scanner.skip_space()
                if (yield from copy_arguments(scanner)):
                    scanner.end_call()
                yield from scanner.skip_space()
                marker = yield from scanner.copy_until([end_call, *outside], scanner.content)
                if marker in outside:
                    continue
        yield from scanner.skip_space()
        marker = yield from scanner.copy_until(outside, scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = f"{lark.text(f'{CALL}functions.{name}:')} /[0-9]+/ {lark.text(ARGUMENTS)}"
    return f"{head} {lark.arguments(schema)} {lark.text(END_CALL)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f"({call})+" if several else call
    return f"{lark.text(SECTION)} {inner} {lark.text(END_SECTION)}"
