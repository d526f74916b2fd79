"""The grammar of each format allows only calls that the format's reader can read, with arguments
that match the tool's schema.
"""

from __future__ import annotations

import ast
import itertools
import json

import pytest
from jsonschema import Draft202012Validator as Validator

from dist_aclgraph.errors import InvalidParameterError, UnusableToolError
from dist_aclgraph.formats.choice import FORMATS
from dist_aclgraph.sampling import StructuredOutputs
from tests import laws
from tests.formats.answers import Message
from tests.formats.test_arguments import BETWEEN
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
NUM_ANSWERS = laws.count(200)
EACH = pytest.mark.parametrize("name", FORMATS)


def check(message: Message, strict: set[str]) -> None:
    for name, arguments, is_whole in message.calls:
        assert is_whole
        found = json.loads(arguments)
        Validator(TOOLS[name] if name in strict else {"type": "object"}).validate(found)


@EACH
def test_required_calls_are_calls_of_the_tools(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True)
    assert form is not None
    found = 0
    for seed in range(NUM_ANSWERS):
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
def test_names_may_have_letters_of_any_script(name):
    city = {"type": "string", "maxLength": 4}
    tools = {"天气": {"type": "object", "properties": {"città": city}, "required": ["città"]}}
    walk = Walk(name, tools)
    form = walk.form.structured(None, tools, set(tools), is_required=True)
    assert form is not None
    answers = filter(None, (walk.answer(form, seed) for seed in range(NUM_ANSWERS)))

    for tokens in itertools.islice(answers, 10):
        if name == "gpt_oss":
            tokens.append(walk.form.token_ids["<|call|>"])
        (called, arguments, is_whole), *_ = walk.read(tokens).calls
        assert (called, is_whole) == ("天气", True)
        assert "città" in json.loads(arguments)


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "llama3_json", "deepseek_v31", "gpt_oss"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"n": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"n": {"type": "integer"}}}}},
        {"anyOf": [{"required": ["n"]}, {"properties": {"n": {"type": "integer"}}}]},
    ],
)
def test_arguments_are_an_object_although_the_schema_does_not_say_so(name, schema):
    walk = Walk(name, {"find": schema})
    form = walk.form.structured(None, {"find": schema}, {"find"}, is_required=True)
    assert form is not None

    for arguments, is_allowed in (
        ('{"n": 1}', True), ('"n"', False), ("[1]", False), ("null", False), ("1", False)
    ):  # fmt: skip
        begin, end = BETWEEN[name]
        tokens = walk.tokens(begin + arguments + (end if name != "gpt_oss" else ""))
        assert walk.allows(form, tokens) == is_allowed, arguments


@EACH
def test_required_calls_may_follow_line_breaks(name):
    """Some templates write line breaks between the reasoning and the first call."""
    if name == "gpt_oss":  # each message begins with a channel's marker
        return
    walk = Walk(name, TOOLS)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True)
    assert form is not None
    call = next(found for seed in range(40) if (found := walk.answer(form, seed)) is not None)
    text = walk.text(call).lstrip("\n")

    for breaks in ("", "\n", "\n\n"):
        tokens = walk.tokens(breaks + text)
        assert walk.allows(form, tokens)
        message = walk.read(tokens)
        assert message.calls
        assert not message.content
    assert not walk.allows(form, walk.tokens("\n\n\n" + text))


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
    begun = "find\n{" if name == "glm4" else ""  # random text does not contain a tool's name
    for seed in range(NUM_ANSWERS):
        if (tokens := walk.answer(form, seed, begun=begun)) is not None:
            if name == "gpt_oss" and walk.form.token_ids["<|constrain|>"] in tokens:
                tokens.append(walk.form.token_ids["<|call|>"])
            message = walk.read(tokens)
            found += len(message.calls)
            check(message, {"find"})
    assert found


@EACH
def test_a_tool_that_is_not_strict_takes_any_arguments(name):
    walk, wanted = Walk(name, TOOLS), {"n": 5, "text": "a b", "more": {"k": [1]}}
    exact = {
        "type": "object",
        "properties": {key: {"const": value} for key, value in wanted.items()},
        "required": list(wanted),
        "additionalProperties": False,
    }
    call = walk.form.structured(
        None, {"find": exact}, {"find"}, is_required=True, is_parallel=False
    )
    assert call is not None
    tokens = walk.answer(call, 1)
    assert tokens is not None
    for strict, is_required in (({"stop"}, False), ({"stop"}, True), (set(), True)):
        form = walk.form.structured(None, TOOLS, strict, is_required=is_required)
        assert form is not None
        assert walk.allows(form, tokens)

    ends = walk.tokens("<|call|>") if name == "gpt_oss" else []
    ((_, arguments, is_whole),) = walk.read(tokens + ends).calls
    assert is_whole
    assert json.loads(arguments) == wanted


@EACH
def test_content_of_a_form_or_calls(name):
    walk = Walk(name, TOOLS)
    form = walk.form.structured(StructuredOutputs(choice=["yes", "no"]), TOOLS, {"find"})
    assert form is not None
    seen = set()
    for seed in range(NUM_ANSWERS):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss" and walk.form.token_ids["<|constrain|>"] in tokens:
                tokens.append(walk.form.token_ids["<|call|>"])
            message = walk.read(tokens)
            check(message, {"find"})
            assert message.calls or message.content in ("yes", "no")
            seen.add(bool(message.calls))
    assert seen == {True, False}


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_content_of_a_form_may_be_between_the_markers_of_a_response(tools):
    walk = Walk("cohere2", TOOLS)
    form = walk.form.structured(StructuredOutputs(choice=["yes", "no"]), tools)
    assert form is not None

    for begin in ("", "<|START_RESPONSE|>"):
        for end in ("", "<|END_RESPONSE|>"):
            tokens = walk.tokens(f"{begin}yes{end}")
            assert walk.allows(form, tokens)
            assert walk.read(tokens) == Message("yes")
    assert not walk.allows(form, walk.tokens("<|START_RESPONSE|>maybe<|END_RESPONSE|>"))
    grammar = StructuredOutputs(grammar='root ::= "yes"')
    assert walk.form.structured(grammar, None) == grammar


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\\/b", "a\\/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), ("", "")],
)
def test_a_pattern_accepts_the_same_texts_in_a_request_with_tools(pattern, text):
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
ROOT_REFERENCE = {
    "$ref": "#/$defs/all",
    "$defs": {
        "n": {"type": "integer", "minimum": 3, "maximum": 5},
        "all": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "enum": ["1", "x"]},
                "n": {"$ref": "#/$defs/n"},
            },
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}
UNIONS = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", None]},
        "b": {"type": ["string", "null"], "enum": ["x", None]},
        "c": {"anyOf": [{"type": "string", "pattern": "^[xy]{2}$"}, {"type": "integer"}]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
STRINGS = {
    "type": "object",
    "$defs": {"word": {"type": "string", "pattern": "^[xy]{2}$"}},
    "properties": {
        "any": {"anyOf": [{"$ref": "#/$defs/word"}, {"enum": ["a", "b c"]}], "title": "any"},
        "one": {"oneOf": [{"const": "1"}, {"enum": ["z"]}]},
        "all": {"allOf": [{"$ref": "#/$defs/word"}], "description": "all"},
        "both": {"type": "string", "enum": ["a", 1, "b"], "const": "b"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3, "default": "z"},
    },
    "required": ["any", "one", "all", "both", "short"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz"]}, "c": {"type": "null"}},
    "additionalProperties": False,
}


@EACH
@pytest.mark.parametrize(
    "schema",
    [REFERENCES, ROOT_REFERENCE, OPTIONAL, UNIONS, STRINGS],
    ids=["parts", "root", "optional", "unions", "strings"],
)
def test_arguments_match_schemas_with_references(name, schema):
    tools = {"find": schema}
    walk = Walk(name, tools)
    form = walk.form.structured(None, tools, {"find"}, is_required=True, is_parallel=False)
    assert form is not None
    found = []
    for seed in range(10):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss":
                tokens.append(walk.form.token_ids["<|call|>"])
            ((_, arguments, is_whole),) = walk.read(tokens).calls
            assert is_whole
            found.append(json.loads(arguments))
            Validator(schema).validate(found[-1])
    assert any(found)


RAW = pytest.mark.parametrize(
    "name",
    ["qwen3_coder", "glm45", "hy_v3", "deepseek_v32", "minimax_m2", "pythonic", "olmo3"],
)
NAMED = {"a": {"type": "integer"}}


@RAW
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#/$defs/none"}, "not the schema of an object"),
        ({"type": "array"}, "not the schema of an object"),
        ({"properties": NAMED, "anyOf": [{"required": ["a"]}]}, "uses anyOf"),
        ({"allOf": [{"properties": NAMED}]}, "uses allOf"),
        ({"properties": NAMED, "required": ["b"]}, "requires 'b'"),
        ({"additionalProperties": {"type": "integer"}}, "no names"),
        ({"properties": {"a>": {}}}, "the name 'a>'"),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": NAMED}}, "required": ["a"]}, "beside"),
    ],
)
def test_a_strict_schema_without_named_parameters_is_refused(name, schema, problem):
    walk = Walk(name, {"find": schema})

    with pytest.raises(InvalidParameterError, match=problem):
        walk.form.structured(None, {"find": schema}, {"find"}, is_required=True)


CALLS = {
    "pythonic": "[find(a={})]",
    "glm45": "<tool_call>find\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
}
FLAG = {"anyOf": [{"$ref": "#/$defs/no"}, {"type": ["integer", "null"]}]}
WRITTEN_IN_PYTHON = [
    ({"type": "boolean"}, ["True", "False"], ["None", "Tru", "'True'"]),
    ({"type": ["boolean", "null"], "description": "?"}, ["True", "None"], ["Null"]),
    ({"enum": [True, 1, None]}, ["True", "None"], ["False"]),
    ({"const": False}, ["False"], ["True"]),
    (FLAG, ["False", "None", "7"], ["True"]),
    ({"type": "boolean", "anyOf": [{"const": True}]}, ["true"], ["True", "False"]),
    ({"type": "integer"}, ["1"], ["True", "None"]),
    ({}, ["True", "None"], []),
]
IN_QUOTES = [
    ({"type": "string"}, ["'a b'", r"'it\'s'", r"'\\\n'", "'\"'"], ["'a", "a", "'a\0'", "'a\nb'"]),
    ({"enum": ["a", "b'"]}, ["'a'", '"b\'"'], ["'b'", r"'b\''"]),
    ({"type": "string", "pattern": "^[xy']+$"}, ["'xy'", '"x\'"'], ["'z'", r"'\''", "'"]),
    ({"type": "string", "maxLength": 2}, ["'ü'", "''"], ["'abc'"]),
    ({"type": "string", "maxLength": 2, "pattern": "^a"}, [], ["'ab'"]),
    ({"type": "string", "format": "date"}, ['"2026-01-01"'], ["'2026-01-01'", '"a"']),
    ({"anyOf": [{"type": "null"}, {"type": "string"}]}, ["'a'", "None"], ["True"]),
    ({"type": ["integer", "string"]}, ["'a'", "1"], ["True"]),
    ({"type": ["integer", "null"]}, ["1"], ["'1'"]),
]


@pytest.mark.parametrize(
    ("name", "part", "allowed", "refused"),
    [
        *((name, *each) for name in CALLS for each in WRITTEN_IN_PYTHON),
        *(("pythonic", *each) for each in IN_QUOTES),
    ],
)
def test_a_strict_argument_may_be_written_as_in_python(name, part, allowed, refused):
    schema = {"properties": {"a": part}, "required": ["a"], "$defs": {"no": {"const": False}}}
    tools = {"find": {"type": "object", **schema}}
    walk = Walk(name, tools)
    form = walk.form.structured(None, tools, {"find"}, is_required=True)
    assert form is not None

    for value in allowed:
        tokens = walk.tokens(CALLS[name].format(value))
        assert walk.allows(form, tokens), value
        ((_, arguments, _),) = walk.read(tokens).calls
        Validator(tools["find"]).validate(json.loads(arguments))
        expected = ast.literal_eval(value) if value != "true" else True
        assert json.loads(arguments) == {"a": expected}
    for value in refused:
        assert not walk.allows(form, walk.tokens(CALLS[name].format(value))), value


WORD = {"type": "string", "pattern": "^[xy]+$"}
TAGS = pytest.mark.parametrize(
    "name", ["qwen3_coder", "glm45", "hy_v3", "deepseek_v32", "minimax_m2"]
)


@TAGS
@pytest.mark.parametrize(
    ("part", "keywords"),
    [
        ({**WORD, "maxLength": 3}, "maxLength with pattern"),
        ({**WORD, "enum": ["x", "z"]}, "enum with pattern"),
        ({"$ref": "#/$defs/word", "maxLength": 3}, r"\$ref with maxLength"),
        ({"allOf": [WORD, {"maxLength": 3}]}, "allOf"),
        ({"oneOf": [WORD, {"type": "string"}]}, "oneOf"),
        ({"anyOf": [WORD], "minLength": 2}, "anyOf with minLength"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "type"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
    ],
)
def test_a_strict_string_that_has_no_quotes_keeps_all_keywords_or_is_refused(name, part, keywords):
    tools = {"find": {"type": "object", "properties": {"a": part}, "$defs": {"word": WORD}}}
    walk = Walk(name, tools)

    with pytest.raises(InvalidParameterError, match=f"uses {keywords} for the string 'a'"):
        walk.form.structured(None, tools, {"find"}, is_required=True)


@TAGS
def test_an_error_names_every_tool_that_the_format_cannot_follow(name):
    odd = {"type": "object", "anyOf": [{}]}
    tools = {"find": TOOLS["find"], "odd": odd, "stop": TOOLS["stop"], "other": odd, "free": odd}
    walk = Walk(name, tools)

    with pytest.raises(UnusableToolError, match="the schema of odd uses anyOf") as refused:
        walk.form.structured(None, tools, set(tools) - {"free"}, is_required=True)

    assert refused.value.tools == ("odd", "other")
    assert refused.value.param == "tools"


@TAGS
def test_strings_that_a_format_cannot_write_are_refused(name):
    end = "</arg_value>" if name in ("glm45", "hy_v3") else "</parameter>"
    part = {"const": f"a{end.replace('</', '</｜DSML｜') if name == 'deepseek_v32' else end}"}
    tools = {"find": {"type": "object", "properties": {"a": part}}}
    walk = Walk(name, tools, has_tokens=False)

    with pytest.raises(InvalidParameterError, match="cannot write any string"):
        walk.form.structured(None, tools, {"find"}, is_required=True)


@TAGS
def test_a_tool_that_is_not_strict_takes_every_name_that_tags_can_contain(name):
    names = ["user id", "filter[name]", "@type", "ü", "a/b"]
    exact = {
        "type": "object",
        "properties": {each: {"const": i} for i, each in enumerate(names)},
        "required": names,
    }
    walk = Walk(name, {"find": exact})
    call = walk.form.structured(None, {"find": exact}, {"find"}, is_required=True)
    assert call is not None
    tokens = next(found for seed in range(9) if (found := walk.answer(call, seed)) is not None)
    free = walk.form.structured(None, {"find": exact}, is_required=True)
    assert free is not None

    assert walk.allows(free, tokens)
