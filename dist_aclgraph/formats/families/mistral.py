"""Mistral: a marker precedes the calls; the checkpoint's template selects one of two forms.

[TOOL_CALLS][{"name": "f", "arguments": {...}}, {"name": "g", "arguments": {...}}]
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_arguments, copy_calls
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (BEGIN, CALL_ID, ARGUMENTS)
BEGINS = (BEGIN,)


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin = scanner.coded(BEGIN)
    marker = yield from scanner.copy_until([begin], scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        while (yield from scanner.match(begin)):  # models can repeat the marker
            yield from scanner.skip_space()
        if (yield from scanner.peek()) in ("[", "{"):
            yield from copy_calls(scanner, begin)
        else:
            repeated = yield from _copy_named(scanner, tools, begin)
            if repeated:
                continue
        marker = yield from scanner.copy_until([begin], scanner.content)


def _copy_named(scanner: Scanner, tools: Tools, begin: str) -> Scan[bool]:
    """Read a call whose name precedes its arguments.

    Returns:
        true if the marker of the next call came before any arguments. If true, the text before this
        marker has become content.
    """
    call_id, arguments = scanner.coded(CALL_ID), scanner.coded(ARGUMENTS)
    name, closing = yield from scanner.read_head([call_id, arguments, "{", begin])
    given_id = ""
    if closing == call_id:
        given_id, closing = yield from scanner.read_head([arguments, "{", begin])
    name = name.strip()
    if closing == begin:
        scanner.content(begin + scanner.give_back(begin))
        return True
    # If the marker before the arguments is missing, the text is a call only if it begins with a
    # tool's name.
    if closing is None or not name or (closing == "{" and name not in tools):
        scanner.content(begin + scanner.give_back())
        return False
    scanner.let_go()
    scanner.begin_call(name, given_id.strip())
    if closing == "{":
        scanner.unread("{")
    yield from scanner.skip_space()
    if (yield from copy_arguments(scanner)):
        scanner.end_call()
    yield from scanner.skip_space()
    return False


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    if lark.is_token(ARGUMENTS):
        return f"{lark.text(BEGIN + name + ARGUMENTS)} {lark.arguments(schema)}"
    head = lark.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    if lark.is_token(ARGUMENTS):
        return f"({call})+" if several else call
    inner = f'{call} (", " {call})*' if several else call
    return f"{lark.text(BEGIN + '[')} {inner} {lark.text(']')}"
