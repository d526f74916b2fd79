"""Phi-4-mini: a list of calls between two tokens, or after the word ``functools``.

    <|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>
    functools[{"name": "f", "arguments": {...}}]

The published template has the tools between ``<|tool|>`` and ``<|/tool|>``, and describes no calls.
With this template, the model writes the first form. The Berkeley leaderboard of function calls
reads the same form. The second form is requested by the template in vLLM's examples, and by the
template of Firefunction 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_calls, copy_marked
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
WORD = "functools["
END_TOOLS = "<|/tool|>"
MARKERS = (BEGIN, END)
BEGINS = (BEGIN, WORD)


def fits(template: str) -> bool:
    return any(text in template for text in (END, WORD, END_TOOLS))


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end = map(scanner.coded, MARKERS)
    begins = [begin, WORD]
    marker = yield from scanner.copy_until(begins, scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        if marker == begin:
            marker = yield from copy_marked(scanner, begin, end, begins)
        else:
            yield from copy_calls(scanner, WORD)
            marker = yield from scanner.copy_until(begins, scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> list[str]:
    inner = f'{call} (", " {call})*' if several else call
    found = [f"{lark.text(WORD)} {inner} {lark.text(']')}"]
    if lark.is_token(BEGIN):
        found.append(f"{lark.text(BEGIN + '[')} {inner} {lark.text(']' + END)}")
    return found
