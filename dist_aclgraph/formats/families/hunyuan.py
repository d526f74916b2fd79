"""Hunyuan: a call has a name, and arguments in a fenced block.

    <tool_calls><tool_call>f
    ```json
    {...}
    ```</tool_call></tool_calls>

With some templates, the calls are a list:
``<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>``. Text after the reasoning is
between ``<answer>`` and ``</answer>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments, copy_calls
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

CALLS, END_CALLS = "<tool_calls>", "</tool_calls>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
AROUND = ("<answer>", "</answer>")  # the markers around the text of an answer
MARKERS = (CALLS, END_CALLS, CALL, END_CALL, *AROUND)
BEGINS = (CALLS, CALL)
FENCE = "```"


def fits(template: str) -> bool:
    return CALLS in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    calls, end_calls, call = map(scanner.coded, (CALLS, END_CALLS, CALL))
    begins = (calls, call)
    marker = yield from scanner.copy_until(begins, scanner.content)
    while marker is not None:
        before: str = marker
        scanner.keep()
        if before == calls:
            yield from scanner.skip_space()
            if (yield from scanner.peek()) in ("[", "{"):
                yield from copy_calls(scanner, calls)
                yield from scanner.skip_space()
                yield from scanner.match(end_calls)
                marker = yield from scanner.copy_until(begins, scanner.content)
                continue
            marker = yield from scanner.match(call)
        if marker == call:
            marker = yield from _copy_named(scanner, before)
        else:  # the text is no call
            scanner.content(before + scanner.give_back())
        if marker is None:
            marker = yield from scanner.copy_until(begins, scanner.content)


def _copy_named(scanner: Scanner, before: str) -> Scan[str | None]:
    """Read a call whose name precedes its arguments.

    Args:
        before: the marker before the text that the scanner has kept (``Scanner.keep``). If the kept
            text is not a call, the marker and this text become content.

    Returns:
        the marker of the next call, if the function has already read it; otherwise None.
    """
    calls, end_calls, call, end_call = map(scanner.coded, MARKERS[:4])
    name, marker = yield from scanner.read_head(["\n", calls, call, end_call, end_calls])
    name = name.strip()
    if marker in (calls, call):
        scanner.content(before + scanner.give_back(marker))
        return marker
    is_call = marker == "\n" and bool(name)
    if is_call and not (yield from scanner.match(f"{FENCE}json\n", f"{FENCE}json", FENCE)):
        is_call = (yield from scanner.peek()) == "{"
    if not is_call:
        scanner.content(before + scanner.give_back())
        return None
    scanner.let_go()
    scanner.begin_call(name)
    yield from scanner.skip_space()
    if scanner.is_cut(FENCE, "json\n"):
        return None
    if (yield from copy_arguments(scanner)):
        scanner.end_call()
    yield from scanner.skip_space()
    yield from scanner.match(FENCE)
    marker = yield from scanner.copy_until([end_call, end_calls, calls, call], scanner.content)
    if marker == end_call:
        yield from scanner.skip_space()
        marker = yield from scanner.match(end_calls, calls, call)
    return marker if marker in (calls, call) else None


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f"{CALL}{name}\n{FENCE}json\n")
    return f"{head} {lark.arguments(schema)} {lark.text(chr(10) + FENCE + END_CALL)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return f"{lark.text(CALLS)} {in_lines(call, several=several)} {lark.text(END_CALLS)}"
