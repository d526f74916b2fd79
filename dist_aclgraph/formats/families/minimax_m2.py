"""MiniMax M2: calls are written in tags between two tokens. The tool's schema determines the types
of values.

<minimax:tool_call>
<invoke name="f">
<parameter name="k">v</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from functools import partial

from dist_aclgraph.formats import invoke_tags
from dist_aclgraph.formats.invoke_tags import Tags, copy_calls

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
MARKERS = (BEGIN, END)
TAGS = Tags((BEGIN, END), ("<invoke", "</invoke>"), ("<parameter", "</parameter>"))
BEGINS = (BEGIN, TAGS.invoke[0])


def fits(template: str) -> bool:
    return BEGIN in template


read = partial(copy_calls, tags=TAGS)
lark_call = partial(invoke_tags.lark_call, tags=TAGS, says_type=False)
lark_calls = partial(invoke_tags.lark_calls, tags=TAGS)
