"""MiniMax M2: calls in tags between two tokens, types by the schema.

<minimax:tool_call>
<invoke name="f">
<parameter name="k">v</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats import invoke_tags
from dist_aclgraph.formats.invoke_tags import Tags, copy_calls
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
MARKERS = (BEGIN, END)
TAGS = Tags((BEGIN, END), ("<invoke", "</invoke>"), ("<parameter", "</parameter>"))


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from copy_calls(scanner, tools, TAGS)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    return invoke_tags.lark_call(lark, name, schema, TAGS, says_type=False)


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return invoke_tags.lark_calls(lark, call, TAGS, several=several)
