"""DeepSeek V3.2: calls are written in tags. Only the part ``｜DSML｜`` of each tag is a token.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

from functools import partial

from dist_aclgraph.formats import invoke_tags
from dist_aclgraph.formats.invoke_tags import Tags, copy_calls

DSML = "｜DSML｜"
MARKERS = (DSML,)
TAGS = Tags(
    (f"<{DSML}function_calls>", f"</{DSML}function_calls>"),
    (f"<{DSML}invoke", f"</{DSML}invoke>"),
    (f"<{DSML}parameter", f"</{DSML}parameter>"),
)
BEGINS = (TAGS.calls[0], TAGS.invoke[0])


def fits(template: str) -> bool:
    return DSML in template and "function_calls>" in template


read = partial(copy_calls, tags=TAGS)
lark_call = partial(invoke_tags.lark_call, tags=TAGS, says_type=True)
lark_calls = partial(invoke_tags.lark_calls, tags=TAGS)
