"""DeepSeek V3.2: calls in tags; ``｜DSML｜`` is the only part of the tags that is a token.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats import invoke_tags
from dist_aclgraph.formats.invoke_tags import Tags, copy_calls
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

DSML = "｜DSML｜"
MARKERS = (DSML,)
TAGS = Tags(
    (f"<{DSML}function_calls>", f"</{DSML}function_calls>"),
    (f"<{DSML}invoke", f"</{DSML}invoke>"),
    (f"<{DSML}parameter", f"</{DSML}parameter>"),
)


def fits(template: str) -> bool:
    return DSML in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from copy_calls(scanner, tools, TAGS)


def lark_call(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    return invoke_tags.lark_call(lark, name, schema, TAGS, says_type=True)


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    return invoke_tags.lark_calls(lark, call, TAGS, several=several)
