"""Arguments of calls become JSON objects, even if a model does not write them as JSON objects."""

from __future__ import annotations

import json

import pytest

from tests.formats.answers import TOOLS, Message, make_format
from tests.formats.test_formats import read

BETWEEN = {  # for each format: text before and after the arguments, in a call of the tool "find"
    "hermes": ('<tool_call>\n{"name": "find", "arguments": ', "}\n</tool_call>"),
    "hermes, name last": ('<tool_call>{"arguments": ', ', "name": "find"}</tool_call>'),
    "llama3_json": ('{"name": "find", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "find", "arguments": ', "}]"),
    "mistral, named": ("[TOOL_CALLS]find[ARGS]", ""),
    "mistral, with an id": ("[TOOL_CALLS] find[CALL_ID]aB3dE5gH7[ARGS] ", "\n"),
    "granite": ('<|tool_call|>[{"name": "find", "arguments": ', "}]"),
    "cohere2": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find", "parameters": ',
        "}\n]<|END_ACTION|>",
    ),
    "hunyuan": (
        "<tool_calls><tool_call>find\n```json\n",
        "\n```</tool_call></tool_calls>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gpt_oss": ("<|channel|>commentary to=functions.find <|constrain|>json<|message|>", "<|call|>"),
}


@pytest.mark.parametrize("kind", BETWEEN)
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("null", {}),
        ("", {}),
        ('{"text": "two\n\tlines"}', {"text": "two\n\tlines"}),
        ('{"n": 1, "n": 2}', {"n": 2}),
        ('{"n": 1e400}', {"n": float("inf")}),
        (r'{"text": "\ud83d\ude00\\"}', {"text": "\U0001f600\\"}),
    ],
)
def test_arguments_are_a_json_object(kind, has_tokens, written, expected):
    name, _, order = kind.partition(",")
    begin, end = BETWEEN[kind]
    form = make_format(name, has_tokens=has_tokens)
    if name == "gpt_oss" and written == "null":
        return  # in gpt-oss, the arguments stay "null"

    for sizes in ((1,), (2, 3), (100,)):
        found = read(form, begin + written + end, sizes)
        if order == " name last" and not written:  # the object then has no key for arguments
            assert found.content
            continue
        ((_, arguments, is_whole),) = found.calls
        if order and not written:  # the answer ends before the arguments
            assert not is_whole
            continue
        assert is_whole
        assert not found.content
        assert json.loads(arguments) == expected


@pytest.mark.parametrize("kind", ["hermes", "hermes, name last", "llama3_json", "kimi_k2"])
@pytest.mark.parametrize(
    ("text", "expected"), [('{"n": 2}', {"n": 2}), ("", {}), ('{"text": "a\nb"}', {"text": "a\nb"})]
)
def test_arguments_may_be_json_within_a_string(kind, text, expected):
    begin, end = BETWEEN[kind]
    form = make_format(kind.partition(",")[0], has_tokens=True)

    ((_, arguments, _),) = read(form, begin + json.dumps(text) + end).calls

    assert json.loads(arguments, strict=False) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n", "7", 7),
        ("n", "many", "many"),
        ("deep", "None", None),
        ("deep", "False", False),
        ("deep", "TRUE", True),
        ("word", "TRUE", "TRUE"),
        ("text", "7", "7"),
        ("more", '{"a": 1}', {"a": 1}),
        ("unknown", "[1]", [1]),
        ("unknown", "word", "word"),
        ("n", "NaN", "NaN"),
        ("word", '"red"', "red"),
        ("word", "red", "red"),
        ("word", "7", "7"),
        ("word", "null", None),
        ("more", "{'a': [True, None]}", {"a": [True, None]}),
        ("more", '{"a": True, "b": null}', {"a": True, "b": None}),
        ("more", "{'a'", "{'a'"),
        ("unknown", "{'a': 1}", "{'a': 1}"),
        ("word", "['a']", "['a']"),
        ("n", "0x10", "0x10"),
    ],
)
def test_the_schema_gives_a_text_its_type(name, value, expected):
    form = make_format("qwen3_coder", has_tokens=True)

    found = read(
        form,
        f"<tool_call>\n<function=find>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>",
    )

    assert json.loads(found.calls[0][1]) == {name: expected}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("int", "5", 5),
        ("float", "2.5", 2.5),
        ("double", "2", 2),
        ("bool", "True", True),
        ("str", "5", "5"),
        ("dict", "{'a': 1}", {"a": 1}),
        ("list", "['a']", ["a"]),
        (["int", "null"], "5", 5),
        ("text", "5", "5"),
    ],
)
def test_other_names_of_types_are_known(kind, value, expected):
    form = make_format("glm45", has_tokens=True)
    tools = {"f": {"type": "object", "properties": {"a": {"type": kind}}}}
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"

    ((_, arguments, _),) = read(form, text, tools=tools).calls

    assert json.loads(arguments) == {"a": expected}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "is_string", "value", "expected"),
    [
        ("n", "true", "42", 42),
        ("n", "true", "many", "many"),
        ("more", "true", '{"a": "b"}', {"a": "b"}),
        ("deep", "true", "true", True),
        ("word", "true", "42", "42"),
        ("word", "false", "null", None),
        ("text", "false", "42", "42"),
        ("unknown", "true", "42", "42"),
        ("unknown", "false", "42", 42),
    ],
)
def test_the_schema_corrects_a_string_of_deepseek(name, is_string, value, expected, has_tokens):
    form = make_format("deepseek_v32", has_tokens=has_tokens)
    value = f'<｜DSML｜parameter name="{name}" string="{is_string}">{value}</｜DSML｜parameter>'
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="find">{value}</｜DSML｜invoke>'

    ((_, arguments, is_whole),) = read(form, text).calls

    assert is_whole
    assert json.loads(arguments) == {name: expected}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("text=New York", "New York"),  # templates show strings of earlier calls without quotes
        ("text=7", "7"),
        ("text=True", "True"),
        ("text='it\\'s'", "it's"),
        ("text=null", "null"),
        ('n="7"', 7),  # or all values in quotes
        ("n='many'", "many"),
        ('deep="True"', True),
        ("deep='null'", None),
        ('more="{\\"a\\": 1}"', {"a": 1}),
        ("more={'a': True}", {"a": True}),
        ("text=San Francisco, CA", "San Francisco, CA"),
        ("text=a, b = c", "a"),
        ("text=it's fine, isn't it", "it's fine, isn't it"),
        ("text='it's fine, isn't it'", "it's fine, isn't it"),
        ('text="the "best", they say"', 'the "best", they say'),
        ("text=say (hi), then go", "say (hi), then go"),
        (r"text=r'a\d'", r"a\d"),
        ("text='x',", "x"),
        ("word=None", None),
        ("word='None'", "None"),
        ("word=7", "7"),
        ("unknown='7'", "7"),
        ("unknown=7", 7),
        ("unknown=[{\"a\": None, 'b': (true, 2)}, null]", [{"a": None, "b": [True, 2]}, None]),
        ("unknown={1: {}}", {"1": {}}),
        ("unknown={1, 2}", "{1, 2}"),
        ("unknown=1e400", float("inf")),
        ("unknown=1.0000000000000000001", 1.0),
        ('text="two\nlines"', "two\nlines"),
        ("text='two\nlines'", "two\nlines"),
        ('more={"a": "two\nlines"}', {"a": "two\nlines"}),
    ],
)
def test_the_schema_gives_a_python_value_its_type(argument, expected):
    form = make_format("pythonic", has_tokens=True)

    ((_, arguments, is_whole),) = read(form, f"[find({argument})]").calls

    assert is_whole
    name = argument.partition("=")[0]
    assert json.loads(arguments)[name] == expected


@pytest.mark.parametrize(
    "text", ['[find("Rome")]', '[find(**{"n": 1})]', "[find(n)]", "[find(=1)]"]
)
def test_python_calls_without_names_of_parameters_are_content(text):
    assert read(make_format("pythonic", has_tokens=True), text, tools=TOOLS) == Message(text)


def test_half_a_surrogate_pair_becomes_a_character_that_can_be_sent():
    halves = r"\ud83d\ude00 \ud83d"
    marked = '<tool_call>{"name": "find", "arguments": "' + halves + '"}</tool_call>'

    for name, text in (("hermes", marked), ("pythonic", f"[find(query='{halves}')]")):
        ((_, arguments, _),) = read(make_format(name, has_tokens=False), text).calls
        assert "\U0001f600 \ufffd" in arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", '[ find( text = "a b" , n = 2 ) ]'),
        (
            "minimax_m2",
            "<minimax:tool_call><invoke name=find><parameter name='text'>a b</parameter>"
            "<parameter name=n>2</parameter></invoke></minimax:tool_call>",
        ),
    ],
)
def test_spaces_and_quotes_around_names_may_vary(name, text):
    expected = [("find", '{"text": "a b", "n": 2}', True)]

    assert read(make_format(name, has_tokens=True), text) == Message(calls=expected)


def test_long_texts_are_no_python_literals():
    form = make_format("pythonic", has_tokens=True)
    for length, expected in ((4000, [None] * 1000), (40_000, "[" + "None," * 10_000 + "]")):
        values = "None," * (length // 4)

        ((_, arguments, _),) = read(form, f"[find(unknown=[{values}])]", (100,)).calls

        assert json.loads(arguments) == {"unknown": expected}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("key", ["arguments", "input"])
@pytest.mark.parametrize(
    ("value", "more", "expected"),
    [
        ('{"n": 1, "text": "a}"}', "", {"n": 1, "text": "a}"}),
        ('{"n": 1}', "word", {"n": 1, "word": "b"}),
        ("{}", "", {}),
        ("{}", "word", {"word": "b"}),
        ('{"other": 1}', "", None),
        ("[1]", "", None),
        ("many", "", None),
    ],
)
def test_all_arguments_may_be_one_object(key, value, more, expected, has_tokens):
    form = make_format("deepseek_v32", has_tokens=has_tokens)
    part = '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>'
    parts = part.format(key, value) + (part.format(more, "b") if more else "")
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="find">{parts}</｜DSML｜invoke>'

    ((_, arguments, is_whole),) = read(form, text).calls
    known = {"find": {"properties": {**TOOLS["find"]["properties"], key: {}}}}
    ((_, unchanged, _),) = read(form, text, tools=known).calls

    assert is_whole
    try:
        other = {key: json.loads(value)}
    except ValueError:
        other = {key: value}
    assert json.loads(arguments) == (other if expected is None else expected)
    assert json.loads(unchanged) == {**other, **({more: "b"} if more else {})}
