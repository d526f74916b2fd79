"""Calls inside reasoning without an end marker, and text that only looks like a call."""

from __future__ import annotations

import pytest

from dist_aclgraph.formats.choice import FORMATS
from tests.formats.answers import ANSWERS, THINK, TOOLS, Message, folded, make_format
from tests.formats.test_formats import read, tokens_of

SIZES = ((1,), (2, 3), (100,))
MARKED = [name for name in FORMATS if FORMATS[name].BEGINS]
EACH = pytest.mark.parametrize("name", MARKED)


def calls_of(name: str) -> str:
    """Return the calls of the format's example, without the text before them."""
    text = ANSWERS[name][0]
    return text[text.index(FORMATS[name].BEGINS[0]) :]


@EACH
@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize("end", ["", "</think>", "</think>\n\n"])
def test_a_call_ends_the_reasoning(name, is_thinking, end):
    form = make_format(name, has_tokens=True, thought=THINK)
    text = f"{'' if is_thinking else '<think>'}hm {calls_of(name)}{end}"

    for sizes in SIZES:
        found = read(form, text, sizes, is_thinking=is_thinking)
        assert found == Message("", "hm ", ANSWERS[name][1].calls)


@EACH
def test_without_its_marker_token_or_its_tool_a_call_is_reasoning(name):
    form, call = make_format(name, has_tokens=True, thought=THINK), calls_of(name)
    spelled = make_format(name, has_tokens=False, thought=THINK)
    others = {"other": {}}

    for each, tools in ((form, None), (form, others), (spelled, TOOLS)):
        found = read(each, f"<think>hm {call}</think>Yes", tools=tools)
        assert found == Message("Yes", f"hm {call}")


@EACH
def test_a_marker_without_a_call_is_reasoning(name):
    form, marker = make_format(name, has_tokens=True, thought=THINK), FORMATS[name].BEGINS[0]

    for text in (marker, f"{marker}{marker} is a marker,", f"{marker}\n{{}} ", f"{marker}find"):
        for sizes in SIZES:
            found = read(form, f"<think>{text}</think>{calls_of(name)}", sizes)
            assert found == Message("", text, ANSWERS[name][1].calls)
        assert read(form, f"<think>{text}") == Message("", text)


@EACH
def test_a_call_before_an_answer_with_an_output_format_is_reasoning(name):
    form, call = make_format(name, has_tokens=True, thought=THINK), calls_of(name)
    reader = form.reader(TOOLS, is_thinking=True, has_form=True)

    tokens = tokens_of(form, f"{call}</think>Yes", (1,))
    events = [event for token in tokens for event in reader.feed(*token)]

    assert folded(events + reader.finish()) == Message("Yes", call)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize("ends", ["</think>", "</think></think>", "\n</think>\n\n</think>\n"])
def test_an_end_of_no_reasoning_is_left_out(ends, is_thinking, has_tokens):
    form = make_format("hermes", has_tokens=has_tokens, thought=THINK)

    for sizes in SIZES:
        for text in ("Yes", "Yes </think>", "  Yes", ""):
            found = read(form, ends + text, sizes, is_thinking=is_thinking)
            assert found == Message(text.lstrip("\n"))
        opened = read(form, f"<think>hm{ends}Yes", sizes)
        assert opened == Message("Yes", "hm")
