"""MiniMax M2: calls in tags between two tokens, types by the schema.

<minimax:tool_call>
<invoke name="f">
<parameter name="k">v</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from dist_aclgraph.formats.invoke_tags import Tags, copy_calls
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
MARKERS = (BEGIN, END)
TAGS = Tags((BEGIN, END), ("<invoke", "</invoke>"), ("<parameter", "</parameter>"))


def fits(template: str) -> bool:
    return BEGIN in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    yield from copy_calls(scanner, tools, TAGS)
