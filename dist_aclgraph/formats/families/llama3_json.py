"""Llama 3: the whole answer is ``{"name": "f", "parameters": {...}}``, with "; " between calls.

An answer that begins like a call is a call only if the name in it is the name of a given tool.
After ``<|python_tag|>``, calls can also follow text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import CallOutcome, copy_call
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

TAG = "<|python_tag|>"
MARKERS = (TAG,)
BEGINS = ()  # a call without ``TAG`` must begin at the answer's first character
HEADER = "<|start_header_id|>"  # every template of Llama 3 contains this token


def fits(template: str) -> bool:
    return '"parameters":' in template and (TAG in template or HEADER in template)


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    tag: str | None = ""
    while tag is not None:
        yield from _copy_calls(scanner, tools, tag)
        tag = yield from scanner.copy_until([scanner.coded(TAG)], scanner.content)


def _copy_calls(scanner: Scanner, tools: Tools, before: str) -> Scan[None]:
    """Read calls, if calls come next.

    Args:
        before: the tag before the calls; empty at the beginning of the answer.
    """
    tag = scanner.coded(TAG)
    while True:
        scanner.keep()
        yield from scanner.skip_space()
        while (yield from scanner.match(tag)):
            yield from scanner.skip_space()
        outcome = yield from copy_call(scanner, tools)
        if outcome is CallOutcome.NO_CALL:
            scanner.content(before + scanner.give_back())
            return
        scanner.let_go()
        before = ""
        if outcome is CallOutcome.CUT:
            return
        scanner.keep()
        yield from scanner.skip_space()
        if not (yield from scanner.match(";", ",")) and (yield from scanner.peek()) != "{":
            scanner.content(scanner.give_back())
            return
        scanner.let_go()


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f'{{"name": {json.dumps(name)}, "parameters": ')
    return f"{head} {lark.arguments(schema)} {lark.text('}')}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    tag = f"({lark.text(TAG)})? " if lark.is_token(TAG) else ""
    return f'{tag}{call} ("; " {call})*' if several else f"{tag}{call}"


def lark_text(lark: Lark, tools: Tools) -> str:
    return lark.text_unless("{", TAG)
