"""GLM-4-0414 and GLM-Z1: lines that are calls, and lines that only look like calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.formats.choice import choose_format
from tests.formats.answers import FOUND, JSON, STOPPED, THINK, TOOLS, Message, make_format
from tests.formats.test_formats import SIZES, read
from tests.formats.walk import Walk

TOKENS = pytest.mark.parametrize("has_tokens", [True, False])
FIND = f"find\n{JSON}"
STOP = "stop\n{}"


@TOKENS
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{FIND}<|assistant|>{STOP}", Message(calls=[FOUND, STOPPED])),
        (f"{FIND}\n{STOP}\n", Message(calls=[FOUND, STOPPED])),
        (f"\n{FIND} \n\n<|assistant|>{STOP}<|assistant|>", Message(calls=[FOUND, STOPPED])),
        (f"find \t\n\n  {JSON}", Message(calls=[FOUND])),
        (f"I look.\n{FIND}", Message("I look.", calls=[FOUND])),
        (f"{STOP}\nDone.", Message("Done.", calls=[STOPPED])),
        (f"{STOP}\nstop it\n{STOP}", Message("stop it", calls=[STOPPED, STOPPED])),
        (f"stop\n\n{FIND}", Message("stop", calls=[FOUND])),
        (f"stop\n{{\n{STOP}", Message("stop\n{", calls=[STOPPED])),
        ('find\n{ "n": 1 }', Message(calls=[("find", '{ "n": 1 }', True)])),
        ('find\n{"n": 1', Message(calls=[("find", '{"n": 1', False)])),
        ("other\n{}", None),
        ("find\nit", None),
        ("find {}", None),
        ("findings\n{}", None),
        ("to find\n{}", None),
        ("I call `find`\n{}", None),
        ("find\n{n: 1}", None),
        ("find\n{ ", None),
        ("find\n", None),
        ("fi", None),
        ("\n```json\n{}\n```", None),
        ("a<|assistant|>b", None),
    ],
)
def test_a_line_with_the_name_of_a_tool_before_json_is_a_call(text, expected, has_tokens):
    form = make_format("glm4", has_tokens=has_tokens)
    expected = expected or Message(text)

    for sizes in ((1,), (2, 3), (100,)):
        found = read(form, text, sizes)
        assert found.calls == expected.calls
        content = found.content.replace("<|assistant|>", "") if found.calls else found.content
        assert content.strip() == expected.content.strip()


PARTS = st.lists(
    st.sampled_from(
        ["find", "stop", "\n", " ", "{", "}", '{"', '{"n": 1}', "<|assistant|>", "{}", '"', "x"]
    ),
    max_size=14,
).map("".join)


@TOKENS
@given(text=PARTS, sizes=SIZES)
def test_no_text_is_lost(text, sizes, has_tokens):
    form = make_format("glm4", has_tokens=has_tokens)

    found = read(form, text, sizes)

    assert found == read(form, text, (len(text) + 1,))
    if not found.calls:
        assert found.content == text
    letters = iter(text)
    assert all(sign in letters for sign in found.content)


def test_the_longest_name_is_called():
    form = make_format("glm4", has_tokens=True)
    tools = {"find": {}, "find_all": {}, "find_all_of": {}}

    for name in tools:
        assert read(form, f"{name}\n{{}}", tools=tools) == Message(calls=[(name, "{}", True)])
    assert read(form, "find_al\n{}", tools=tools) == Message("find_al\n{}")


def test_a_call_follows_the_reasoning():
    form = make_format("glm4", has_tokens=True, thought=THINK)

    for sizes in ((1,), (2, 3), (100,)):
        found = read(form, f"\nI\n{STOP}\n</think>\n{FIND}", sizes, is_thinking=True)
        assert found == Message("", f"I\n{STOP}", calls=[FOUND])


@TOKENS
def test_text_beside_strict_tools_has_no_line_that_is_a_call(has_tokens):
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = {**TOOLS, "stop": empty}
    walk = Walk("glm4", tools, has_tokens=has_tokens)
    form = walk.form.structured(None, tools, ["stop"])
    assert form is not None

    for text in ("Hi", "find it\n{}", "finder\n{}", "```json\n{}\n```", "stop\nit", "a\nstop {}"):
        assert walk.allows(form, walk.tokens(text)), text
    for text in ('stop\n{"n": 1}', "a\nstop\n{}", "a\nfind \t\n \n{", "find\n{n}"):
        assert not walk.allows(form, walk.tokens(text)), text
    assert walk.allows(form, walk.tokens("stop\n{}"))
    assert walk.allows(form, walk.tokens('find\n{"x": 1}<|assistant|>stop\n{}'))


def test_names_with_signs_of_patterns_are_names():
    tools = {name: {"type": "object"} for name in ("a.b", "a/b", "-x", "天气")}
    walk = Walk("glm4", tools)
    form = walk.form.structured(None, tools, list(tools))
    assert form is not None

    assert walk.allows(form, walk.tokens("axb\n{}"))
    for name in tools:
        call = f'{name}\n{{"k": 1}}'
        assert walk.allows(form, walk.tokens(call))
        assert not walk.allows(form, walk.tokens(f"x\n{call}"))
        ((called, arguments, _),) = walk.read(walk.tokens(call)).calls
        assert (called, json.loads(arguments)) == (name, {"k": 1})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("[gMASK]{% if tools %}{% set meta = m.get('metadata') %}{% endif %}", "glm4"),
        ("[gMASK]{% if item['tools'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}", "glm4"),
        ("[gMASK]{% if tools %}<|observation|><arg_key><arg_value>", "glm45"),
        ("{% if tools %}{{ message.metadata }}", None),
    ],
)
def test_templates_of_glm(template, expected):
    assert choose_format(template, lambda text: None).name == expected
