"""Seed-OSS: like Qwen3-Coder, but with other outer tags, and without line breaks around values.

<seed:tool_call>
<function=f>
<parameter=k>v</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.families.qwen3_coder import (
    END_FUNCTION,
    END_PARAMETER,
    ENDS,
    FUNCTION,
    PARAMETER,
    copy_tagged_calls,
)
from dist_aclgraph.formats.lark import Lark, in_lines
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
MARKERS = (BEGIN, END)
BEGINS = (BEGIN, FUNCTION)


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    markers = scanner.coded(BEGIN), scanner.coded(END)
    yield from copy_tagged_calls(scanner, tools, markers, trims=False)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head, end = lark.text(f"{BEGIN}\n{FUNCTION}{name}>\n"), lark.text(f"{END_FUNCTION}\n{END}")
    parts = lark.parameters(name, schema, lambda _: (PARAMETER, ">"), f"{END_PARAMETER}\n", ENDS)
    return f"{head} {parts} {end}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return in_lines(call, several=several)
