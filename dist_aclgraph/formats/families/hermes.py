"""Hermes, Qwen2.5, Qwen3: ``<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.json_call import copy_marked_calls
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<tool_call>", "</tool_call>"
MARKERS = (BEGIN, END)
BEGINS = (BEGIN,)
# Finds the marker and the beginning of a call in the text of a template. In templates of other
# families, the text after this marker is not a JSON call. The quotes of the call can be escaped
# with a backslash. The text "' + '" can be between the marker and the call.
_CALL = re.compile(
    re.escape(BEGIN) + r""".{0,60}?(\{\s*\\*["'](name|arguments)\b|function\s*\|\s*tojson)""",
    re.DOTALL,
)


def fits(template: str) -> bool:
    return _CALL.search(template) is not None


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from copy_marked_calls(scanner, scanner.coded(BEGIN), scanner.coded(END))


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ')
    return f"{head} {lark.arguments(schema)} {lark.text('}' + chr(10) + END)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return in_lines(call, several=several)
