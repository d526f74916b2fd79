"""In every answer that the grammar allows, arguments of strict tools are complete and match their
schema, whatever text the arguments contain.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.choice import FORMATS
from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.sampling import StructuredOutputs
from tests.formats.answers import Message, make_format
from tests.formats.walk import Walk

PLACE = "PLACE"
TEXT = {"type": "string"}
TAGS = {
    *(marker for each in FORMATS.values() for marker in each.MARKERS),
    *("</parameter>", "\n</parameter>\n", "<parameter=n>", "\n<parameter=", "</function>"),
    *("\n</function>", "<function=find>", "</invoke>", '<invoke name="find">', "<arg_key>"),
    *("</｜DSML｜parameter>", "\n", '"', "\\", "}", "}}", "{", "[", ")", "]", "; ", "```"),
}
VALUES = st.lists(
    st.one_of(st.sampled_from(sorted(TAGS)), st.sampled_from(["a", "ü", " ", "<", "</", ">"])),
    max_size=4,
).map("".join)
# Harmony's markers are always tokens.
EACH = pytest.mark.parametrize(
    ("name", "has_tokens"),
    [(name, each) for name in FORMATS for each in (True, False) if each or name != "gpt_oss"],
)
KINDS = {"string": TEXT, "array": {"type": "array", "items": TEXT}}
PREFIXES = ["", "I look. ", "<", "{", "[", " ", "\n", "\x1c", "<tool_call", '{"name": "find"']


def tools_of(part: Any) -> dict[str, Any]:
    """Return a tool whose only parameter has the schema ``part``."""
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"]}
    return {"find": {**schema, "additionalProperties": False}}


@cache
def walk_of(name: str, has_tokens: bool, kind: str) -> Walk:
    return Walk(name, tools_of({"type": kind}), has_tokens=has_tokens)


@cache
def call_of(name: str, has_tokens: bool, kind: str) -> tuple[str, str]:
    """Make a call whose argument is ``PLACE``; return the call's text before and after the
    argument.
    """
    walk = walk_of(name, has_tokens, kind)
    tools = tools_of({"const": PLACE if kind == "string" else [PLACE]})
    form = walk.form.structured(None, tools, {"find"}, is_required=True, is_parallel=False)
    assert form is not None
    tokens = walk.answer(form, 1)
    assert tokens is not None
    before, after = walk.text(tokens).split(PLACE)
    return before, after


@cache
def form_of(name: str, has_tokens: bool, kind: str, is_required: bool) -> StructuredOutputs:
    walk = walk_of(name, has_tokens, kind)
    form = walk.form.structured(None, tools_of(KINDS[kind]), {"find"}, is_required=is_required)
    assert form is not None
    return form


def read(walk: Walk, tokens: list[int]) -> Message:
    """Read the tokens of an answer as a message.

    In gpt-oss, the token that ends a call also ends the answer.
    """
    return walk.read(tokens + (walk.tokens("<|call|>") if walk.form.has_channels else []))


@EACH
@given(st.booleans(), st.sampled_from(sorted(KINDS)), VALUES)
def test_an_allowed_argument_is_read_as_it_was_written(
    name: str, has_tokens: bool, is_required: bool, kind: str, value: str
) -> None:
    walk, (before, after) = walk_of(name, has_tokens, kind), call_of(name, has_tokens, kind)
    is_quoted = before.endswith('"') and after.startswith('"')
    escaped = json.dumps(value, ensure_ascii=False)[1:-1]
    if before.endswith("'"):  # Python's other quotes
        is_quoted, escaped = True, escaped.replace('\\"', '"').replace("'", "\\'")
    written = escaped if is_quoted else value
    tokens = walk.tokens(before) + walk.spelled(written) + walk.tokens(after)
    is_allowed = walk.allows(form_of(name, has_tokens, kind, is_required), tokens)

    # A text that stands between tags without quotes cannot contain the closing tag.
    assert is_allowed or (not is_quoted and "<" in value)
    if is_allowed:
        ((_, arguments, is_whole),) = read(walk, tokens).calls
        assert is_whole
        assert json.loads(arguments) == {"x": value if kind == "string" else [value]}


def test_long_schemas_are_refused_before_they_are_copied(monkeypatch):
    monkeypatch.setattr(Lark, "json", None)
    tools = {name: {"description": name * 40_000, "type": "object"} for name in "ab"}

    with pytest.raises(InvalidParameterError, match="at most 65536 are allowed"):
        make_format("hermes", has_tokens=True).structured(None, tools, tools)


@EACH
@given(*[st.sampled_from(sorted(KINDS))] * 2, st.sampled_from(PREFIXES), st.booleans())
def test_text_before_a_call_does_not_free_its_arguments(
    name: str, has_tokens: bool, written: str, kind: str, prefix: str, has_marker: bool
) -> None:
    walk = walk_of(name, has_tokens, kind)
    call = PLACE.join(call_of(name, has_tokens, written))
    if not has_marker:  # readers accept some calls without their first marker
        call = call.removeprefix(FORMATS[name].MARKERS[0]).lstrip("\n")
    tokens = walk.spelled(prefix) + walk.tokens(call)

    if walk.allows(form_of(name, has_tokens, kind, False), tokens):
        for _, arguments, is_whole in read(walk, tokens).calls:
            assert is_whole
            jsonschema.validate(json.loads(arguments), tools_of(KINDS[kind])["find"])
    elif has_marker and kind == written and prefix in ("", "I look. "):
        # In these formats, an answer that begins with other text contains no calls.
        assert prefix
        assert name in ("llama3_json", "pythonic", "gpt_oss", "cohere2")
