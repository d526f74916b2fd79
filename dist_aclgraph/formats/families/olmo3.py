"""OLMo 3: calls in Python's syntax, one in each line, between two tags.

<function_calls>
f(a=1, b="x")
g()
</function_calls>
"""

from __future__ import annotations

from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.python_call import copy_call, lark_call
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

__all__ = ["BEGINS", "MARKERS", "fits", "lark_call", "lark_calls", "read"]

BEGIN, END = "<function_calls>", "</function_calls>"
MARKERS = (BEGIN, END)
BEGINS = (BEGIN,)


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end = map(scanner.coded, MARKERS)
    marker = yield from scanner.copy_until([begin], scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        # the first marker is followed by another marker, not by a call
        if (yield from scanner.match(begin)):
            scanner.content(begin + scanner.give_back(begin))
            continue
        is_call = yield from copy_call(scanner, tools)
        if scanner.is_keeping:
            scanner.content(begin + scanner.give_back())
            marker = yield from scanner.copy_until([begin], scanner.content)
            continue
        while is_call:
            scanner.keep()
            yield from scanner.skip_space()
            is_call = yield from copy_call(scanner, tools)
        if scanner.is_keeping:
            scanner.content(scanner.give_back())
        marker = yield from scanner.copy_until([end, begin], scanner.content)
        if marker == end:
            marker = yield from scanner.copy_until([begin], scanner.content)


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    begin, end = lark.text(f"{BEGIN}\n"), lark.text(f"\n{END}")
    return f"{begin} {in_lines(call, several=several)} {end}"
