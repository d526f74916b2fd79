"""DeepSeek V3.1: a call has the markers of V3, but no type and no fence.

<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.families import deepseek_v3
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

MARKERS, BEGINS = deepseek_v3.MARKERS, deepseek_v3.BEGINS


def fits(template: str) -> bool:
    return deepseek_v3.CALLS in template and deepseek_v3.FENCE not in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from deepseek_v3.copy_calls(scanner, is_fenced=False)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any] | None) -> str:
    head = lark.text(f"{deepseek_v3.CALL}{name}{deepseek_v3.SEPARATOR}")
    return f"{head} {lark.arguments(schema)} {lark.text(deepseek_v3.END_CALL)}"


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f"({call})+" if several else call
    return f"{lark.text(deepseek_v3.CALLS)} {inner} {lark.text(deepseek_v3.END_CALLS)}"
