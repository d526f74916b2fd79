"""Phi-4-mini: both forms of its calls are read in answers, and allowed by grammars."""

from __future__ import annotations

import pytest
from hypothesis import given

from dist_aclgraph.formats.choice import choose_format
from tests.formats.answers import FOUND, JSON, STOPPED, Message, make_format
from tests.formats.test_formats import SIZES, read
from tests.formats.walk import Walk

TOKENS = pytest.mark.parametrize("has_tokens", [True, False])
ONE = f'{{"name": "find", "arguments": {JSON}}}'
TWO = f'{ONE}, {{"name": "stop"}}'
STOP = '{"name": "stop", "arguments": {}}'
TOOLS = {"stop": {"type": "object", "properties": {}, "additionalProperties": False}}


@TOKENS
@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_call|>[{TWO}]<|/tool_call|>",
        f"<|tool_call|>{TWO}<|/tool_call|>",
        f"<|tool_call|>[{TWO}]",
        f"functools[{TWO}]",
        f"functools[\n  {TWO}\n]",
        f"functools[ {TWO.replace('arguments', 'parameters')}",
        f"functools[{ONE}]\nfunctools[{STOP}]",
        f"<|tool_call|>[{ONE}]<|/tool_call|>functools[{STOP}]",
        f"functools[{ONE}]<|tool_call|>{STOP}",
    ],
)
@given(sizes=SIZES)
def test_a_list_of_calls_has_either_form(text, has_tokens, sizes):
    form = make_format("phi4_mini_json", has_tokens=has_tokens)

    expected = Message("I look.", calls=[FOUND, STOPPED])
    assert read(form, f"I look.\n{text}", sizes) == expected
    expected.content += "\nDone."
    assert read(form, f"I look.\n{text}\nDone.", sizes) == expected


@TOKENS
@pytest.mark.parametrize(
    "text",
    [
        "functools[] This is just text",
        "functools[ This is just text ]",
        "functools[1, 2]",
        'functools{"name": "stop"}',
        "import functools",
        "functools[functools[",
        '<|tool_call|>{"a": 1}<|/tool_call|>',
        "<|tool_call|> is a marker",
        '<|tool_call|><|tool_call|>{"',
        'functools[{"name": "stop',
    ],
)
def test_text_that_is_no_list_of_calls_is_content(text, has_tokens):
    form = make_format("phi4_mini_json", has_tokens=has_tokens)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == Message(text)


@TOKENS
@pytest.mark.parametrize("is_required", [True, False])
def test_a_strict_call_may_have_either_form_that_the_vocabulary_allows(is_required, has_tokens):
    walk = Walk("phi4_mini_json", TOOLS, has_tokens=has_tokens)
    form = walk.form.structured(None, TOOLS, {"stop"}, is_required=is_required)
    assert form is not None
    before = "" if is_required else "I use functools, [not] a "
    token = f"{before}<|tool_call|>[{STOP}]<|/tool_call|>"

    assert walk.allows(form, walk.tokens(f"{before}functools[{STOP}, {STOP}]"))
    assert walk.allows(form, walk.tokens(token)) == has_tokens
    assert not walk.allows(form, walk.tokens(f"{before}functools[1]"))
    assert not walk.allows(form, walk.tokens(f'{before}functools[{{"name": "other"}}]'))
    assert walk.allows(form, walk.tokens("Hi, functools.")) != is_required


@pytest.mark.parametrize(
    "template",
    [
        "respond in this format: <|tool_call|>{...}<|/tool_call|>",
        "generated in a single JSON list formatted as functools[{...}, ...]",
        "{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    ],
)
def test_a_template_that_describes_the_calls_has_the_format(template):
    assert choose_format(template, lambda text: None).name == "phi4_mini_json"
