"""Hy3: both spellings of its tags, markers with a suffix, and calls with errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from dist_aclgraph.formats.choice import choose_format
from dist_aclgraph.formats.families import hy_v3
from dist_aclgraph.formats.reasoning import Thought
from tests.formats.answers import ANSWERS, FOUND, JSON, STOPPED, TOOLS, Message, make_format
from tests.formats.test_formats import SIZES, read
from tests.formats.walk import Walk

SUFFIX = ":opensource"
SPELLED = pytest.mark.parametrize("suffix", [SUFFIX, ""])
TOKENS = pytest.mark.parametrize("has_tokens", [True, False])
# This template builds its markers as the published template does.
TEMPLATE = """{% set END = ":opensource" -%}
{% set sep = '<tool_sep{}>'.format(END) %}{% set key = '<arg_key{}>'.format( END ) %}
{% set think = "</think{}>" . format(END) %}{% set other = '<a{}>'.format(OTHER) %}"""


@SPELLED
@TOKENS
@given(sizes=SIZES)
def test_tags_may_have_a_suffix_or_not(suffix, has_tokens, sizes):
    text, expected = ANSWERS["hy_v3"]
    form = make_format("hy_v3", has_tokens=has_tokens)

    assert read(form, text.replace(SUFFIX, suffix), sizes) == expected
    assert read(form, text.replace(SUFFIX, suffix).replace(">\n<", "><"), sizes) == expected


@TOKENS
@SPELLED
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The first answer lacks the <tool_calls> tags; the second answer lacks <tool_sep>.
        ("<tool_call>stop<tool_sep></tool_call>.", Message(".", calls=[STOPPED])),
        ("<tool_calls><tool_call>stop</tool_call></tool_calls>", Message(calls=[STOPPED])),
        (
            "<tool_calls>\n<tool_call>find\n<arg_key>n</arg_key><arg_value>1</arg_value>\n"
            "</tool_call></tool_calls>",
            Message(calls=[("find", '{"n": 1}', True)]),
        ),
        # In the first answer, only the arguments are JSON; in the second answer, the whole list of
        # calls is JSON.
        (f"<tool_calls><tool_call>find<tool_sep>{JSON}</tool_call>", Message(calls=[FOUND])),
        (
            f'<tool_calls>[{{"name": "find", "arguments": {JSON}}}]</tool_calls>',
            Message(calls=[FOUND]),
        ),
        # Tags without calls are text.
        ("<tool_calls>none</tool_calls>", None),
        ("The tag <tool_call> begins\na call", None),
        ("<tool_calls><tool_call><tool_sep></tool_call></tool_calls>", None),
        ("<tool_call>stop</arg_value>", None),
        ("<tool_calls><tool_call>{}</tool_call></tool_calls>", None),
        # The answer is cut off.
        (
            "<tool_calls>\n<tool_call>find<tool_sep>\n<arg_key>text</arg_key>\n<arg_value>a b",
            Message(calls=[("find", '{"text": "a b', False)]),
        ),
        ("<tool_calls>\n<tool_call>find<tool_sep>\n", Message(calls=[("find", "", False)])),
        ("<tool_calls>\n<tool_call>fi", None),
    ],
)
def test_calls_that_are_not_well_formed(text, expected, suffix, has_tokens):
    form = make_format("hy_v3", has_tokens=has_tokens)
    for tag in ("calls", "call", "sep"):
        text = text.replace(f"tool_{tag}>", f"tool_{tag}{suffix}>")
    for tag in ("key", "value"):
        text = text.replace(f"arg_{tag}>", f"arg_{tag}{suffix}>")

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == (expected or Message(text))


def test_markers_with_a_suffix_are_found_in_a_template():
    ids = {"<think:opensource>": 7, "</think:opensource>": 8, "<tool_calls:opensource>": 9}
    form = choose_format(TEMPLATE, ids.get)

    assert form.name == "hy_v3"
    assert form.thought == Thought("<think:opensource>", "</think:opensource>")
    assert form.token_ids == ids


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace(":opensource", ":other"),
        TEMPLATE.replace("set END", "set NO"),
        "{% set parts = content.split('<tool_sep>') %}<function name=",  # MiniCPM5
        "{% set END = ':6124c78e' %}{{ '<tool_calls{}>'.format(END) }}<arg_key{}>",  # Hy4
    ],
)
def test_other_suffixes_and_separators_have_no_format(template):
    assert choose_format(template, lambda text: None).name is None


def test_the_preview_is_not_taken_for_glm():
    template = "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>k</arg_key>\n<arg_value>v"

    assert choose_format(template, lambda text: None).name == "hy_v3"


@TOKENS
def test_required_calls_have_the_tags_of_the_vocabulary(has_tokens):
    walk = Walk("hy_v3", TOOLS, has_tokens=has_tokens)
    form = walk.form.structured(None, {"stop": {}}, {"stop"}, is_required=True)
    assert form is not None
    call = "<tool_calls>\n<tool_call>stop<tool_sep>\n</tool_call>\n</tool_calls>"
    released = call.replace(">", f"{SUFFIX}>")

    assert walk.allows(form, walk.tokens(released)) == has_tokens
    assert walk.allows(form, walk.tokens(call)) != has_tokens


@SPELLED
def test_a_strict_call_of_either_spelling_is_read_as_its_schema_says(suffix):
    walk = Walk("hy_v3", TOOLS)
    key, value = (f"<arg_{each}{suffix}>" for each in ("key", "value"))
    text = "".join(
        f"{key}{name}{key.replace('<', '</')}\n{value}{written}{value.replace('<', '</')}\n"
        for name, written in (("n", "7"), ("text", "7"), ("deep", "False"))
    )
    begin = f"<tool_call{suffix}>find<tool_sep{suffix}>\n"

    ((_, arguments, is_whole),) = walk.read(walk.tokens(f"{begin}{text}</tool_call{suffix}>")).calls

    assert is_whole
    assert json.loads(arguments) == {"n": 7, "text": "7", "deep": False}


def test_every_tag_is_a_marker():
    assert len(set(hy_v3.MARKERS)) == 18
