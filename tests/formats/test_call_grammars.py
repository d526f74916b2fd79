"""The grammar of each format allows only calls that its reader can read, with arguments that match
the schema.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.choice import FORMATS
from dist_aclgraph.sampling import StructuredOutputs
from tests.formats.answers import Message
from tests.formats.walk import Walk

TOOLS = {
    "find": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "text": {"type": "string", "maxLength": 5},
            "deep": {"type": "boolean"},
            "kind": {"enum": ["a", "b c"]},
        },
        "required": ["n", "text"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
EACH = pytest.mark.parametrize("name", FORMATS)


def check(message: Message, strict: set[str]) -> None:
    for name, arguments, is_whole in message.calls:
        assert is_whole
        found = json.loads(arguments)
        jsonschema.validate(found, TOOLS[name] if name in strict else {"type": "object"})


@EACH
def test_required_calls_are_calls_of_the_tools(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True)
    assert form is not None
    found = 0
    for seed in range(40):
        tokens = walk.answer(form, seed)
        if tokens is None:
            continue
        if name == "gpt_oss":  # this token ends the answer
            tokens.append(walk.form.token_ids["<|call|>"])
        message = walk.read(tokens)
        found += 1
        assert message.calls
        assert not message.content
        check(message, set(TOOLS))
    assert found > 5


@EACH
def test_one_call_if_calls_are_not_parallel(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True, is_parallel=False)
    assert form is not None
    answers = [walk.read(tokens) for seed in range(12) if (tokens := walk.answer(form, seed))]

    assert all(len(message.calls) == 1 for message in answers)


@EACH
def test_strict_tools_are_checked_within_text(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(None, TOOLS, {"find"})
    assert form is not None
    found = 0
    for seed in range(60):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss" and walk.form.token_ids["<|constrain|>"] in tokens:
                tokens.append(walk.form.token_ids["<|call|>"])
            message = walk.read(tokens)
            found += len(message.calls)
            check(message, {"find"})
    assert found


@EACH
def test_content_of_a_form_or_calls(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(StructuredOutputs(choice=["yes", "no"]), TOOLS, {"find"})
    assert form is not None
    seen = set()
    for seed in range(60):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss" and walk.form.token_ids["<|constrain|>"] in tokens:
                tokens.append(walk.form.token_ids["<|call|>"])
            message = walk.read(tokens)
            check(message, {"find"})
            assert message.calls or message.content in ("yes", "no")
            seen.add(bool(message.calls))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\\/b", "a\\/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), ("", "")],
)
def test_a_pattern_says_the_same_beside_calls(pattern, text):
    walk = Walk("hermes", TOOLS)
    form = walk.form.structured(StructuredOutputs(regex=pattern), TOOLS)
    assert form is not None
    matcher = walk.matcher(form)

    assert matcher.consume_tokens([*walk.tokens(text), walk.end])


def test_a_pattern_cannot_leave_its_place():
    walk = Walk("hermes", TOOLS)

    with pytest.raises(InvalidParameterError, match="backslash"):
        walk.form.structured(StructuredOutputs(regex="a\\"), TOOLS)


REFERENCES = {
    "type": "object",
    "definitions": {
        "word": {"type": "string", "pattern": "^[xy]{2}$"},
        "pair": {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}], "minItems": 1, "items": {
            "$ref": "#/definitions/same"}, "maxItems": 2},
        "same": {"$ref": "#/properties/flag"},
    },
    "$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
    "properties": {
        "flag": {"type": "boolean"},
        "word": {"$ref": "#/definitions/word"},
        "pair": {"$ref": "#/definitions/pair"},
    },
    "required": ["flag", "word", "pair"],
    "additionalProperties": False,
}  # fmt: skip


@EACH
def test_arguments_match_schemas_with_references(name):
    tools = {"find": REFERENCES}
    walk = Walk(name, tools)
    form = walk.form.structured(None, tools, {"find"}, is_required=True, is_parallel=False)
    assert form is not None
    found = 0
    for seed in range(10):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss":
                tokens.append(walk.form.token_ids["<|call|>"])
            ((_, arguments, is_whole),) = walk.read(tokens).calls
            assert is_whole
            jsonschema.validate(json.loads(arguments), REFERENCES)
            found += 1
    assert found
