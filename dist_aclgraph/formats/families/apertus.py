"""Apertus: a call is a JSON object with one key, the tool's name; the value is the arguments.

``<|tools_prefix|>[{"f": {...}}, {"g": {...}}]<|tools_suffix|>``. The deliberation, between
``<|inner_prefix|>`` and ``<|inner_suffix|>``, can contain calls. The source is the chat template of
swiss-ai/Apertus-8B-Instruct-2509.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_keyed_call, copy_lists
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
MARKERS = (BEGIN, END)
BEGINS = (BEGIN,)


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end = map(scanner.coded, MARKERS)
    yield from copy_lists(scanner, begin, end, copy_keyed_call)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f"{{{json.dumps(name)}: ")
    return f"{head} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f'{call} (", " {call})*' if several else call
    return f"{lark.text(BEGIN + '[')} {inner} {lark.text(']' + END)}"
