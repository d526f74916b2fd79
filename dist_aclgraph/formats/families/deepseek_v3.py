"""DeepSeek V3 and R1: a call has a type, a name, and arguments in a fenced block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKERS = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
BEGINS = (CALLS, CALL)
FENCE = "```"


def fits(template: str) -> bool:
    return CALLS in template and FENCE in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from copy_calls(scanner, is_fenced=True)


def copy_calls(scanner: Scanner, *, is_fenced: bool) -> Scan[None]:
    """Read content and calls.

    Args:
        is_fenced: whether each call has a type before its name, and its arguments in a fenced
            block.
    """
    calls, end_calls, call, end_call, separator = map(scanner.coded, MARKERS)
    outside = (calls, end_calls, call)
    marker = yield from scanner.copy_until(outside, scanner.content)
    while marker is not None:
        if marker != call:  # the marker before all calls or after all calls
            yield from scanner.skip_space()
            marker = yield from scanner.copy_until(outside, scanner.content)
            continue
        scanner.keep()
        name, marker = yield from scanner.read_head([separator, *outside, end_call])
        if is_fenced and marker == separator:
            name, marker = yield from scanner.read_head(["\n", *outside, end_call])
            if marker == "\n":
                yield from scanner.match("```json\n", "```json", FENCE)
        if marker in outside:  # the call's arguments are missing
            scanner.content(call + scanner.give_back(marker))
            continue
        if marker not in (separator, "\n") or not name.strip():
            scanner.content(call + scanner.give_back())
        else:
            scanner.let_go()
            scanner.begin_call(name.strip())
            yield from scanner.skip_space()
            if scanner.is_cut(FENCE, "json\n"):
                return
            if (yield from copy_arguments(scanner)):
                scanner.end_call()
            yield from scanner.skip_space()
            if is_fenced:
                yield from scanner.match(FENCE)
            marker = yield from scanner.copy_until([end_call, *outside], scanner.content)
            if marker in outside:
                continue
        yield from scanner.skip_space()
        marker = yield from scanner.copy_until(outside, scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f"{CALL}function{SEPARATOR}{name}\n```json\n")
    return f"{head} {lark.arguments(schema)} {lark.text(chr(10) + FENCE + END_CALL)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = in_lines(call, several=several)
    return f"{lark.text(CALLS)} {inner} {lark.text(END_CALLS)}"
