"""Qwen3-Coder, Qwen3.5: each parameter is a text between tags; the schema says its type.

<tool_call>
<function=f>
<parameter=k>
v
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_marked
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools
from dist_aclgraph.formats.typed_values import Arguments

BEGIN, END = "<tool_call>", "</tool_call>"
MARKERS = (BEGIN, END)
FUNCTION, END_FUNCTION = "<function=", "</function>"
BEGINS = (BEGIN, FUNCTION)
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# Models can forget the end tag of a parameter. So a line that begins with the tag of the next
# parameter, or with the end tag of the function, also ends the parameter.
ENDS = (END_PARAMETER, "\n" + PARAMETER, "\n" + END_FUNCTION)


def fits(template: str) -> bool:
    return FUNCTION in template and PARAMETER in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    markers = scanner.coded(BEGIN), scanner.coded(END)
    yield from copy_tagged_calls(scanner, tools, markers, trims=True)


def copy_tagged_calls(
    scanner: Scanner, tools: Tools, markers: tuple[str, str], *, trims: bool
) -> Scan[None]:
    """Read content in which each call is between two markers.

    Args:
        trims: whether two line breaks are removed from each value: after its first tag, and before
            its last tag.
    """
    begin, end = markers
    begins = [begin, FUNCTION]
    marker = yield from scanner.copy_until(begins, scanner.content)
    while marker is not None:
        scanner.keep()
        if marker == begin:
            yield from scanner.skip_space()
            if (yield from scanner.peek()) in ("{", "["):  # models also write JSON
                marker = yield from copy_marked(scanner, begin, end, begins)
                continue
        is_call = marker == FUNCTION or (yield from scanner.match(FUNCTION)) is not None
        name, closing = "", None
        if is_call:
            name, closing = yield from scanner.read_head([">", "\n", *markers, FUNCTION])
        name = name.strip()
        if closing in (begin, FUNCTION):  # the end of the name is missing
            scanner.content(marker + scanner.give_back(closing))
            marker = closing
            continue
        # If a model forgets the first marker, the text is a call only if it has the name of a given
        # tool.
        if closing != ">" or not name or (marker == FUNCTION and name not in tools):
            scanner.content(marker + scanner.give_back())
            marker = yield from scanner.copy_until(begins, scanner.content)
            continue
        scanner.let_go()
        yield from _copy_call(scanner, name, tools, markers, trims=trims)
        marker = yield from scanner.copy_until(begins, scanner.content)


def _copy_call(
    scanner: Scanner, name: str, tools: Tools, outer: tuple[str, str], *, trims: bool
) -> Scan[None]:
    scanner.begin_call(name)
    arguments = Arguments(scanner, tools.get(name, {}))
    marker = None
    while True:
        if marker is None:
            yield from scanner.skip_space()
            marker = yield from scanner.match(PARAMETER, END_FUNCTION, outer[1])
        if marker is None or marker.strip() != PARAMETER:
            break
        key, closing = yield from scanner.read_until([">", "\n"])
        if closing is None:
            return  # the answer has ended
        end = yield from arguments.copy_value(key.strip(), ENDS, trims=trims)
        if end is None:
            return
        marker = None if end == END_PARAMETER else end.strip()
    if marker is None and scanner.is_cut(PARAMETER, END_FUNCTION, outer[1]):
        return
    arguments.end()
    if marker == END_FUNCTION:
        yield from scanner.skip_space()
        yield from scanner.match(outer[1])


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head, end = lark.text(f"{BEGIN}\n{FUNCTION}{name}>\n"), lark.text(f"{END_FUNCTION}\n{END}")
    parts = lark.parameters(
        name, schema, lambda _: (PARAMETER, ">\n"), f"\n{END_PARAMETER}\n", ENDS
    )
    return f"{head} {parts} {end}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return in_lines(call, several=several)
