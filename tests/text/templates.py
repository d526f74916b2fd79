"""Templates of tests. All share one process, because a start takes a quarter of a second."""

from __future__ import annotations

from collections.abc import Mapping

from dist_aclgraph.text.chat_template import ChatTemplate
from dist_aclgraph.text.child_process import ChildProcess

_idle: list[ChildProcess] = []  # ends with the process of the tests


def make_template(source: str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Return a template with ordinary limits, which a process of earlier tests renders."""
    template = ChatTemplate({"default": source}, special_tokens or {})
    template._idle = _idle
    return template
