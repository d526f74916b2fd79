"""Clients of the Responses API send earlier reasoning back in ``encrypted_content``."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from dist_aclgraph.serve.responses.input import read_input
from tests.serve.openai.test_responses import THOUGHT, ask, events_of

ASKED = ["reasoning.encrypted_content"]
TEXT = "\nhm, 2\n"


def reasoning_of(*, content: list[dict] | None = None, **fields: str | None) -> str | None:
    """Send a reasoning item with ``content``, and then a function call; return the reasoning that
    the template gets for the call.
    """
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": content, **fields},
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
    ]
    return read_input(Raw(json.dumps(items).encode()), None)[-1]["reasoning_content"]


@pytest.mark.parametrize("stream", [False, True])
def test_returned_reasoning_reaches_the_template(tooled, stream):
    tooled.answer(THOUGHT)

    reply = events_of(tooled, include=ASKED)[1] if stream else ask(tooled, include=ASKED)

    (item, _) = reply.output
    assert item.content[0].text.strip() == TEXT.strip()
    assert reasoning_of(encrypted_content=item.encrypted_content) == item.content[0].text
    other = [{"type": "reasoning_text", "text": "other"}]
    assert reasoning_of(encrypted_content=item.encrypted_content, content=other) == "other"


def test_without_the_entry_of_include_the_reasoning_is_not_encoded(tooled):
    tooled.answer(THOUGHT)

    assert ask(tooled).output[0].encrypted_content is None


@pytest.mark.parametrize("value", [None, "", "gAAAAABo-from-a-provider", "text:%", "text:/w=="])
def test_a_value_of_another_provider_has_no_effect(value):
    assert reasoning_of(encrypted_content=value) is None
