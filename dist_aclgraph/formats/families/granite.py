"""Granite 3: ``<|tool_call|>[{"name": "f", "arguments": {...}}, ...]``.

Some checkpoints write the marker as ``<tool_call>``. Granite 3.3 writes ``<response>`` and
``</response>`` around the text after its reasoning. Granite 4 writes calls in the format of Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_calls
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, SPELLED = "<|tool_call|>", "<tool_call>"
AROUND = ("<response>", "</response>")  # the markers around the text of an answer
MARKERS = (BEGIN, SPELLED, *AROUND)
BEGINS = (BEGIN, SPELLED)


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begins = [scanner.coded(each) for each in BEGINS]
    marker = yield from scanner.copy_until(begins, scanner.content)
    while marker is not None:
        scanner.keep()
        yield from scanner.skip_space()
        # the first marker is followed by another marker, not by a call
        if repeated := (yield from scanner.match(*begins)):
            scanner.content(marker + scanner.give_back(repeated))
            marker = repeated
            continue
        yield from copy_calls(scanner, marker)
        marker = yield from scanner.copy_until(begins, scanner.content)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f'{call} (", " {call})*' if several else call
    return f"{lark.text(BEGIN + '[')} {inner} {lark.text(']')}"
