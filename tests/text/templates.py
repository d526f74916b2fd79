"""Chat templates for tests. One process renders all templates, because the start of a process takes
a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist_aclgraph.text.chat_template import ChatTemplate
from dist_aclgraph.text.child_process import ChildProcess

_idle: list[ChildProcess] = []  # at most one process; it ends with the test process


def make_template(source: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Return a template with ordinary limits. All such templates are rendered by one process, which
    the first test starts.
    """
    template = ChatTemplate({"default": source}, special_tokens or {})
    template._idle = _idle
    return template
