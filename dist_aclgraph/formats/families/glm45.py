"""GLM-4.5 and later: a call has the name, then pairs of ``<arg_key>`` and ``<arg_value>``.

    <tool_call>f
    <arg_key>k</arg_key>
    <arg_value>v</arg_value>
    </tool_call>

Texts are written without quotes, other values as JSON. GLM-4.7 writes no newlines.
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
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
BEGINS = (BEGIN,)
MARKERS = (BEGIN, END, KEY, END_KEY, VALUE, END_VALUE)

ENDS = (END_VALUE, END)


def fits(template: str) -> bool:
    return KEY in template and VALUE in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end, key_begin, key_end, value_begin, value_end = map(scanner.coded, MARKERS)
    marker = yield from scanner.copy_until([begin], scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        if (yield from scanner.peek()) in ("{", "["):  # models also write JSON
            marker = yield from copy_marked(scanner, begin, end, [begin])
            continue
        name, marker = yield from scanner.read_head([key_begin, end, begin, "\n"])
        if marker == "\n":
            yield from scanner.skip_space()
            marker = yield from scanner.match(key_begin, end, begin)
        if marker == begin:
            scanner.content(begin + scanner.give_back(begin))
            continue
        if marker not in (key_begin, end) or not name.strip() or "{" in name:
            scanner.content(begin + scanner.give_back())
            marker = yield from scanner.copy_until([begin], scanner.content)
            continue
        scanner.let_go()
        name = name.strip()
        scanner.begin_call(name)
        arguments = Arguments(scanner, tools.get(name, {}))
        # Models can forget the end tags. Then the next tag ends the text, if it is a token.
        value_ends = [value_end, end, *([key_begin] if key_begin != KEY else [])]
        key_ends = [key_end, end, *([value_begin] if value_begin != VALUE else [])]
        while marker == key_begin:
            key, marker = yield from scanner.read_until(key_ends)
            if marker is None:
                return
            if marker == end:
                break
            if marker == key_end:
                yield from scanner.skip_space()
                if not (yield from scanner.match(value_begin)):
                    marker = None
                    break
            marker = yield from arguments.copy_value(key.strip(), value_ends)
            if marker is None:
                return
            if marker == value_end:
                yield from scanner.skip_space()
                marker = yield from scanner.match(key_begin, end)
        if marker is None and scanner.is_cut(key_begin, value_begin, end):
            return
        arguments.end()
        marker = yield from scanner.copy_until([begin], scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    parts = lark.parameters(
        name, schema, lambda _: (KEY, f"{END_KEY}\n{VALUE}"), f"{END_VALUE}\n", ENDS
    )
    return f"{lark.text(f'{BEGIN}{name}' + chr(10))} {parts} {lark.text(END)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return in_lines(call, several=several)
