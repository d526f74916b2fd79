"""Each format reads the answers of its model family, however the text is divided into tokens, and
loses no text.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.structured_text import TOOLS as BENCH_TOOLS
from benchmarks.structured_text import call_of
from dist_aclgraph.config.serve import ToolFormat
from dist_aclgraph.formats.choice import FORMATS
from dist_aclgraph.formats.events import CallArguments, Content, Reasoning
from dist_aclgraph.formats.scanner import Scanner
from tests.formats.answers import (
    ANSWERS,
    THINK,
    TOOLS,
    Message,
    as_tokens,
    folded,
    make_format,
)
from tests.laws import count

EACH = pytest.mark.parametrize("name", FORMATS)
PYTHON = ("pythonic", "olmo3")  # formats of Python's calls
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def tokens_of(form, text, sizes):
    return as_tokens(text, dict(form.token_ids), itertools.cycle(sizes))


def events_of(form, text, sizes=(1,), tools=TOOLS, is_thinking=False, num_tokens=None):
    reader = form.reader(tools, is_thinking=is_thinking)
    kept = itertools.islice(tokens_of(form, text, sizes), num_tokens)
    return [event for token in kept for event in reader.feed(*token)] + reader.finish()


def read(form, text, sizes=(1,), tools=TOOLS, is_thinking=False) -> Message:
    return folded(events_of(form, text, sizes, tools, is_thinking))


@EACH
@pytest.mark.parametrize("has_tokens", [True, False])
@given(sizes=SIZES)
def test_an_answer_says_the_same_however_it_is_divided(name, has_tokens, sizes):
    text, expected = ANSWERS[name]

    assert read(make_format(name, has_tokens=has_tokens), text, sizes) == expected


@pytest.mark.parametrize("name", ["मौसम", "วันนี้", "citta\u0300"])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("pythonic", '[{0}(n=1, {0}="a, b")]'),
        (
            "gpt_oss",
            "<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>"
            '{{"n": 1, "{0}": "a, b"}}<|call|>',
        ),
    ],
)
def test_names_may_have_combining_marks(form, text, name):
    found = read(make_format(form, has_tokens=True), text.format(name), tools={name: {}})

    ((called, arguments, is_complete),) = found.calls
    assert (called, json.loads(arguments)) == (name, {"n": 1, name: "a, b"})
    assert is_complete


@pytest.mark.slow
@EACH
def test_thousands_of_divisions_say_the_same(name):
    text, expected = ANSWERS[name]
    form, chance = make_format(name, has_tokens=True), random.Random(name)

    for _ in range(count(10_000)):
        assert read(form, text, chance.choices(range(1, 10), k=40)) == expected


@EACH
@pytest.mark.parametrize("has_tokens", [True, False])
@given(data=st.data())
def test_an_answer_that_is_cut_off_keeps_its_text(name, has_tokens, data):
    form = make_format(name, has_tokens=has_tokens)
    text, expected = ANSWERS[name]
    num_tokens = data.draw(st.integers(0, len(text)))
    sizes = data.draw(SIZES)

    found = folded(events_of(form, text, sizes, num_tokens=num_tokens))

    # The text is the content of the whole answer, perhaps followed by the beginning of an
    # incomplete call.
    said = "".join(piece for _, piece in itertools.islice(tokens_of(form, text, sizes), num_tokens))
    assert said.rstrip().endswith(found.content.removeprefix(expected.content).strip())
    assert [call[0] for call in found.calls] == [c[0] for c in expected.calls[: len(found.calls)]]
    for (_, part, is_whole), (_, whole, _) in zip(found.calls, expected.calls, strict=False):
        assert whole.startswith(part) or name in PYTHON  # only complete literals are emitted
        assert not is_whole or part == whole


@EACH
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_marker_that_is_written_twice_hides_no_call(name, has_tokens):
    text, expected = ANSWERS[name]
    for begin in FORMATS[name].BEGINS or FORMATS[name].MARKERS[:1]:
        whole = text if begin in text else begin + text
        at = whole.rindex(begin)
        found = read(make_format(name, has_tokens=has_tokens), f"{whole[:at]}{begin}{whole[at:]}")
        assert found.calls == expected.calls
        assert begin in found.content or len(found.content) == len(expected.content)


PARTS = st.lists(
    st.one_of(
        st.sampled_from(sorted({m for each in FORMATS.values() for m in each.MARKERS})),
        st.sampled_from(['{"name": "find"', ', "arguments": {', "}", "}}", '"', "\\", ":", "null"]),
        st.sampled_from(["<function=find>", "</function>", "<parameter=n>", "</parameter>", "\n"]),
        st.sampled_from(["```json", "```json\n", "```"]),
        st.sampled_from(["find", "functions.find:0", '<invoke name="find">', "[find(", ")]", " "]),
        st.text(max_size=8),
    ),
    max_size=16,
).map("".join)


@EACH
@pytest.mark.parametrize("has_tokens", [True, False])
@given(text=PARTS, sizes=SIZES)
@example(text="<｜tool▁call▁begin｜>f<｜tool▁sep｜>g<｜tool▁call▁begin｜>```json", sizes=[1])
def test_a_broken_answer_ends_in_text_or_in_calls(name, has_tokens, text, sizes):
    form = make_format(name, has_tokens=has_tokens)

    found = read(form, text, sizes)

    assert found == read(form, text, (len(text) + 1,))
    letters = iter(text)
    assert all(sign in letters for sign in found.content), "no text is written twice"
    if not found.calls and not found.reasoning and name not in ("gpt_oss", "kimi_k2"):
        outer = ANSWERS[name][0] if name.startswith("deepseek") else ""
        if form.around is not None:
            assert without_space(found.content) == without_space(without_wrapping(form, text))
        else:
            assert outer or found.content == text


def without_space(text):
    return "".join(text.split())


def without_wrapping(form, text):
    """Return the text without the markers around its calls; markers that are content stay."""
    begin, end = form.around
    is_begun = text.lstrip().startswith(begin)
    text = text.replace(begin, "", 1) if is_begun else text
    return text.replace(begin, "").replace(end, "") if is_begun or form.token_ids else text


@EACH
def test_text_is_held_back_no_longer_than_its_marker(name):
    reader = make_format(name, has_tokens=False).reader(TOOLS, is_thinking=False)
    start = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    shown = ""
    for letter in f"{start}Some text, a < b, and [1] and more":
        shown += folded(reader.feed(0, letter)).content

    assert shown == "Some text, a < b, and [1] and more"


@EACH
@pytest.mark.parametrize("has_tokens", [True, False])
def test_text_that_begins_like_a_call_is_held_back_no_longer_than_a_name(name, has_tokens):
    form = make_format(name, has_tokens=has_tokens)
    inner = {
        "deepseek_v32": "\n<｜DSML｜invoke",
        "minimax_m2": "\n<invoke",
        "gpt_oss": "<|channel|>",
    }
    objects = ['{"', '{"title": "', '{"name": "', '{"type": "']
    begins = [marker + each for marker in FORMATS[name].BEGINS for each in ["", *objects]]
    begins += [*objects, "[find", "<"]
    long = "and more words, " * 40
    for begin in (each + inner.get(name, "") for each in begins):
        reader = form.reader(TOOLS, is_thinking=False)
        tokens = tokens_of(form, begin + long, (1,))
        shown = folded(event for token in tokens for event in reader.feed(*token)).content

        assert shown.rstrip().endswith(long.rstrip()), begin


@EACH
def test_the_bench_of_readers_has_a_call_in_each_format(name):
    message = read(make_format(name, has_tokens=False), call_of(name, "a word"), tools=BENCH_TOOLS)

    assert [called for called, *_ in message.calls] == ["find"]
    assert '"a word' in message.calls[0][1]


def test_arguments_are_streamed_piece_by_piece():
    for name, (text, _) in ANSWERS.items():
        events = events_of(make_format(name, has_tokens=True), text)
        pieces = [event.text for event in events if isinstance(event, CallArguments)]
        assert len(pieces) > 8 or name in PYTHON
        assert all(pieces)


def test_a_marker_that_is_spelled_in_other_tokens_is_text():
    form = make_format("hermes", has_tokens=True)
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    reader = form.reader(TOOLS, is_thinking=False)

    events = [event for letter in call for event in reader.feed(0, letter)] + reader.finish()

    assert folded(events) == Message(content=call)


@pytest.mark.parametrize(
    ("answer", "is_thinking", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, Message("Yes", "hm")),
        ("\nhm\n\n</think>\n\nYes", True, Message("Yes", "hm")),
        ("\n  hm</think>Yes", True, Message("Yes", "  hm")),
        ("<think>hm</think>Yes", True, Message("Yes", "hm")),
        ("hm", True, Message("", "hm")),
        ("hm\n", True, Message("", "hm\n")),
        ("Yes <think>", False, Message("Yes <think>")),
        (
            "<think><tool_call>{}</tool_call></think>",
            False,
            Message("", "<tool_call>{}</tool_call>"),
        ),
        (
            '<think>hm</think>\n<tool_call>{"name": "stop"}</tool_call>\n',
            False,
            Message("", "hm", [("stop", "{}", True)]),
        ),
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_reasoning_comes_before_the_answer(answer, is_thinking, expected, has_tokens):
    form = make_format("hermes", has_tokens=has_tokens, thought=THINK)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, answer, sizes, is_thinking=is_thinking) == expected


def test_tokens_of_reasoning_are_counted():
    form = make_format(None, has_tokens=True, thought=THINK)
    reader = form.reader(None, is_thinking=False)
    for token in as_tokens("<think>abc</think>de", dict(form.token_ids), itertools.repeat(1)):
        reader.feed(*token)

    assert reader.num_thought_tokens == 5  # the markers count as tokens of the reasoning


@pytest.mark.parametrize(
    ("prompt", "continues", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", False, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<|im_start|>user\nsay <think> to me<|im_end|>\n<|im_start|>assistant\n", False, False),
        ("<|im_start|>assistant\n<think>\nI have", True, True),
    ],
)
def test_the_prompt_tells_whether_reasoning_has_begun(prompt, continues, expected):
    form = make_format(None, has_tokens=True, thought=THINK)

    assert form.is_thinking(prompt, continues=continues) is expected


def test_without_tools_only_reasoning_is_read():
    form = make_format("hermes", has_tokens=True, thought=THINK)
    call = '<tool_call>{"name": "stop"}</tool_call> \n'

    assert read(form, call, tools=None) == Message(call)
    assert make_format("hermes", has_tokens=True).reader(None, is_thinking=False) is None


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"n": 2}, "name": "find"}', '{"n": 2}'),
        ('{"name": "find", "arguments": {"n": 2}', '{"n": 2}'),
        ('{"name": "find"}', "{}"),
        ('{"id": 7, "name": "find", "arguments": "{\\"n\\": 2}"}', '{"n": 2}'),
        ('{"name":"find","arguments":{"n":2,}}', '{"n":2,}'),
    ],
)
def test_objects_that_models_write_are_calls(text, arguments):
    form = make_format("hermes", has_tokens=True)

    found = read(form, f"<tool_call>{text}</tool_call>")

    assert found == Message(calls=[("find", arguments, True)])


@pytest.mark.parametrize("text", ["no json", '{"nam": "find"}', "{}", '{"name": 3}', '{"name'])
def test_an_invalid_call_becomes_content(text):
    form = make_format("hermes", has_tokens=True)

    assert (
        read(form, f"<tool_call>{text}</tool_call>.").content == f"<tool_call>{text}</tool_call>."
    )


@EACH
@pytest.mark.parametrize("tool", ["2go", "-x", "a.b", "a:b", "a/b", "_"])
def test_every_name_that_a_request_may_give_a_tool_is_read(name, tool):
    text = ANSWERS[name][0].replace("find", tool)

    calls = read(make_format(name, has_tokens=True), text, tools={tool: {}, "stop": {}}).calls

    assert [each[0] for each in calls] == [
        each[0].replace("find", tool) for each in ANSWERS[name][1].calls
    ]


def test_json_with_a_string_that_never_ends_ends_at_the_first_tag():
    form = make_format("qwen3_coder", has_tokens=False)
    text = (
        '<tool_call>\n<function=find>\n<parameter=more>\n{"a": "x\n</parameter>\n'
        "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    )

    ((_, arguments, is_whole),) = read(form, text, (3,)).calls

    assert is_whole
    assert json.loads(arguments) == {"more": '{"a": "x', "n": 5}


def test_a_string_that_never_ends_does_not_contain_the_next_call():
    form = make_format("qwen3_coder", has_tokens=True)
    text = "".join(
        f"<tool_call>\n<function=find>\n<parameter=more>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
        for value in ('{"a": "x', 'say "hi')
    )

    assert len(read(form, text, (3,)).calls) == 2


def test_only_given_tools_are_called_where_no_marker_says_so():
    for name, text in (
        ("llama3_json", '{"name": "other", "parameters": {}} is JSON'),
        ("pythonic", "[other(n=1)]"),
        ("qwen3_coder", "<function=other>\n</function>"),
    ):
        assert read(make_format(name, has_tokens=True), text) == Message(text)


def test_events_of_content_and_reasoning_are_never_empty():
    form = make_format("hermes", has_tokens=False, thought=THINK)
    text = "<think>\nhm\n</think>\n\n" + ANSWERS["hermes"][0] + "\n"

    for event in events_of(form, text):
        assert not isinstance(event, Content | Reasoning) or event.text


def test_the_configuration_names_every_format():
    assert set(get_args(ToolFormat)) == {"auto", "none", *FORMATS}


def test_long_texts_are_read_in_linear_time():
    """If the time grew with the square of the length, each of these texts would take minutes."""
    head = "<｜DSML｜function_calls>\n<｜DSML｜invoke" + "a" * 300_000

    assert read(make_format("deepseek_v32", has_tokens=False), head, (50_000,)).content == head
    blanks = " " * 4_000_000 + "x"
    assert read(make_format("hermes", has_tokens=False), blanks, (50,)).content == blanks


def test_every_character_of_a_name_is_read():
    text = "<|channel|>commentary to=functions.a/b:c-d <|constrain|>json<|message|>{}<|call|>"

    ((name, _, _),) = read(make_format("gpt_oss", has_tokens=False), text).calls

    assert name == "a/b:c-d"


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("end", ["<|end|>", "<|call|>", "<|return|>", ""])
def test_text_without_a_head_is_content_of_channels(end, has_tokens):
    text = f"Sure.{end}<|start|>assistant<|channel|>final<|message|>Hello"

    assert read(make_format("gpt_oss", has_tokens=has_tokens), text) == Message("Sure.Hello")


def test_strings_without_an_end_are_searched_only_once(monkeypatch):
    searches, unread = [], Scanner.unread
    monkeypatch.setattr(
        Scanner, "unread", lambda scanner, text: (searches.append(text), unread(scanner, text))
    )
    tools = {"f": {"type": "object", "properties": {'a"': {"type": "object"}}}}
    # In each parameter, a quote begins a string that does not end before the parameter's end.
    values = '<parameter=a">\n"\n</parameter>\n' * 40
    form = make_format("qwen3_coder", has_tokens=False)

    read(form, f"<tool_call>\n<function=f>\n{values}", tools=tools)

    assert len(searches) == 1
