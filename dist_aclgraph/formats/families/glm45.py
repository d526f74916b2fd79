"""GLM-4.5 and later: a call has the name, then pairs of ``<arg_key>`` and ``<arg_value>``.

    <tool_call>f
    <arg_key>k</arg_key>
    <arg_value>v</arg_value>
    </tool_call>

GLM-4.7 writes no newlines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_marked
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.pair_tags import PairTags, copy_pairs, lark_pairs
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"
TAGS = PairTags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), END)
BEGINS = (BEGIN,)
MARKERS = (BEGIN, END, *TAGS.key, *TAGS.value)


def fits(template: str) -> bool:
    return TAGS.key[0] in template and TAGS.value[0] in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end, key_begin = map(scanner.coded, (BEGIN, END, TAGS.key[0]))
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
        if not (yield from copy_pairs(scanner, tools.get(name, {}), TAGS, marker)):
            return
        marker = yield from scanner.copy_until([begin], scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    parts = lark_pairs(lark, name, schema, TAGS)
    return f"{lark.text(f'{BEGIN}{name}' + chr(10))} {parts} {lark.text(END)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return in_lines(call, several=several)
