"""Command R7B and Command A: an answer is either a list of calls or a response.

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]<|END_ACTION|>
    <|START_RESPONSE|>...<|END_RESPONSE|>

Clients do not get the model's ids of calls. The model counts from 0 in each conversation, but
clients expect each id only once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from dist_aclgraph.formats.json_call import copy_call, copy_lists
from dist_aclgraph.formats.lark import ANY, Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
AROUND = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")  # the markers around the text of an answer
MARKERS = (BEGIN, END, *AROUND)
BEGINS = ()  # empty: an answer consists either of calls or of text
NAME = "tool_name"
INDENT = "\n    "  # the text before each call, as in the templates


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    begin, end = scanner.coded(BEGIN), scanner.coded(END)
    yield from copy_lists(scanner, begin, end, partial(copy_call, name_key=NAME))


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    number = lark.text(f'{INDENT}{{"tool_call_id": "')
    named = lark.text(f'", "{NAME}": {json.dumps(name)}, "parameters": ')
    return f"{number} /[0-9]+/ {named} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f'{call} ("," {call})*' if several else call
    return f"{lark.text(BEGIN + '[')} {inner} {lark.text(chr(10) + ']' + END)}"


def lark_text(lark: Lark, tools: Tools) -> str:
    return lark.until(ANY, "", [BEGIN])
