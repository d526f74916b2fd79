"""Chat templates, and forms of calls, that only one model family has."""

from __future__ import annotations

import pytest
from hypothesis import given

from dist_aclgraph.formats.choice import choose_format
from dist_aclgraph.formats.reasoning import find_thought
from tests.formats.answers import FOUND, JSON, STOPPED, THINK, TOOLS, Message, make_format
from tests.formats.test_formats import SIZES, read
from tests.formats.walk import Walk


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("between", ["[ARGS]", "[CALL_ID]aB3dE5gH7[ARGS]", " "])
@given(sizes=SIZES)
def test_calls_of_mistral_may_have_names_before_their_arguments(between, has_tokens, sizes):
    text = f"I look.[TOOL_CALLS]find{between}{JSON}[TOOL_CALLS]stop{between}{{}}"

    found = read(make_format("mistral", has_tokens=has_tokens), text, sizes)

    assert found == Message("I look.", calls=[FOUND, STOPPED])


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    "begin", ["<|tool_call|>", "<tool_call>", "<|tool_call|> ", "<tool_call>\n"]
)
@given(sizes=SIZES)
def test_calls_of_granite_may_have_either_marker(begin, has_tokens, sizes):
    text = f'{begin}[{{"name": "find", "arguments": {JSON}}}, {{"name": "stop"}}]'

    found = read(make_format("granite", has_tokens=has_tokens), text, sizes)

    assert found == Message(calls=[FOUND, STOPPED])


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    "text", ["<tool_call> is a tag", '<|tool_call|>[{"a": 1}]', "<|tool_call|>x"]
)
def test_markers_of_granite_without_calls_are_text(text, has_tokens):
    assert read(make_format("granite", has_tokens=has_tokens), text) == Message(text)


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|START_RESPONSE|>Yes<|END_RESPONSE|>", Message("Yes")),
        ("\n<|START_RESPONSE|>\nYes\n\n<|END_RESPONSE|>", Message("Yes\n")),
        ("<|START_RESPONSE|>Yes", Message("Yes")),
        ("Yes", Message("Yes")),
        (
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
            Message("Yes", "hm"),
        ),
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_markers_around_a_response_are_no_content(text, expected, tools, has_tokens):
    thought = find_thought("<|START_THINKING|><|END_THINKING|>")
    form = make_format("cohere2", has_tokens=has_tokens, thought=thought)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes, tools=tools) == expected


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_response_of_granite_follows_its_reasoning(has_tokens):
    form = make_format("granite", has_tokens=has_tokens, thought=THINK)

    for text in ("<think>hm</think><response>Yes</response>", "<think>hm</think>\nYes"):
        for sizes in ((1,), (2, 3), (100,)):
            for tools in (TOOLS, None):
                assert read(form, text, sizes, tools=tools) == Message("Yes", "hm")


def test_markers_around_a_response_are_text_where_they_are_spelled_within_text():
    text = "The markers are <|START_RESPONSE|> and <|END_RESPONSE|>"

    assert read(make_format("cohere2", has_tokens=False), text) == Message(text)
    found = read(make_format("cohere2", has_tokens=True), text)
    assert found == Message("The markers are  and ")


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>stop\n{}</tool_call>", Message(calls=[STOPPED])),
        (
            '<tool_calls> [{"name": "stop", "arguments": {}}, {"name": "stop"}] </tool_calls>.',
            Message(".", calls=[STOPPED, STOPPED]),
        ),
        ("<tool_calls>\n<tool_call>stop\n```\n{}\n```</tool_call>", Message(calls=[STOPPED])),
        ("The tag <tool_call> begins\na call", Message("The tag <tool_call> begins\na call")),
        ("<tool_calls>none</tool_calls>", Message("<tool_calls>none</tool_calls>")),
        ("<answer>\nYes\n</answer>", Message("Yes")),
    ],
)
def test_calls_and_answers_of_hunyuan(text, expected, has_tokens):
    form = make_format("hunyuan", has_tokens=has_tokens)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == expected


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<function_calls>stop()</function_calls> Yes", Message("Yes", calls=[STOPPED])),
        ("<function_calls>\nstop()\nx</function_calls>", Message("x", calls=[STOPPED])),
        ("<function_calls>other()</function_calls>", None),
        ("<function_calls>stop</function_calls>", None),
        (
            "<function_calls>stop()<function_calls>\nstop()\n",
            Message(calls=[STOPPED, STOPPED]),
        ),
        (
            "<function_calls>find(text='it's', word=null, more={'k': [1]})</function_calls>",
            Message(calls=[("find", '{"text": "it\'s", "word": null, "more": {"k": [1]}}', True)]),
        ),
    ],
)
def test_calls_of_olmo(text, expected, has_tokens):
    form = make_format("olmo3", has_tokens=has_tokens)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == (expected or Message(text))


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'<|tools_prefix|>\n[{{"find" : {JSON} }}]', Message(calls=[FOUND])),
        ('<|tools_prefix|>{"stop": {}}<|tools_suffix|> Yes', Message("Yes", calls=[STOPPED])),
        (
            '<|tools_prefix|>[{"stop": {}}, 1]<|tools_suffix|>',
            Message(", 1]<|tools_suffix|>", calls=[STOPPED]),
        ),
        (
            '<|tools_prefix|>[{"stop": {}}, {"find": {"n": 1',
            Message(calls=[STOPPED, ("find", '{"n": 1', False)]),
        ),
        ('<|tools_prefix|>[{"stop": 1}]<|tools_suffix|>', None),
        ('<|tools_prefix|>[{"name": "stop", "arguments": {}}]<|tools_suffix|>', None),
        ("<|tools_prefix|>[]<|tools_suffix|>", None),
        ('<|tools_prefix|>[{"stop"', None),
        ("<|tools_prefix|> is a marker", None),
    ],
)
def test_calls_of_apertus(text, expected, has_tokens):
    form = make_format("apertus", has_tokens=has_tokens)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == (expected or Message(text))


def test_calls_of_apertus_end_its_deliberation():
    thought = find_thought("<|inner_prefix|><|inner_suffix|>")
    form = make_format("apertus", has_tokens=True, thought=thought)
    call = '<|tools_prefix|>[{"stop": {}}]<|tools_suffix|>'

    for end in ("<|inner_suffix|>", ""):
        for sizes in ((1,), (2, 3), (100,)):
            found = read(form, f"<|inner_prefix|>I look.{end}{call}", sizes)
            assert found == Message("", "I look.", calls=[STOPPED])


def test_a_template_without_calls_has_no_format():
    form = choose_format("{{ messages }}", lambda text: None)

    assert form.name is None
    assert form.is_plain


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "pythonic"),
        ("[func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        (
            "{{ '<' + dsml_token + 'function_calls>' }}{% set dsml_token = '｜DSML｜' %}",
            "deepseek_v32",
        ),
        ("respond only with <|tool_call|> followed by a JSON list of tools used.", "granite"),
        ("1. Action: write <|START_ACTION|> followed by a list of JSON-formatted", "cohere2"),
        ("first print <tool_calls> ... <tool_call>function_name\n```json\n", "hunyuan"),
        ('<tool_calls>[{"name": "func_name1", "arguments": {}},...]</tool_calls>', "hunyuan"),
        ("calls, respond with a call wrapped in <function_calls></function_calls> tags", "olmo3"),
        *(
            (text, "hermes")
            for text in (
                # EXAONE 4; then Granite 4, Ling 2.0 and SmolLM3
                "within <tool_call> and </tool_call> tags, like:\n"
                '<tool_call>{"name": function_1_name, "arguments": {...}}</tool_call>',
                "function name and arguments within <tool_call></tool_call> XML tags:"
                '\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}',
            )
        ),
        ("<|tool_call_start|>\n```python\nf(a=1)\n```\n<|tool_call_end|>", None),  # MiniCPM
        ("<｜DSML｜tool_calls>", None),  # DeepSeek V4 writes other tags
        (f'<tool_call>{"another form, " * 6}{{"name": 1}}', None),
        # MiniMax M3; then a template of Functionary for Llama 3.1
        ("{% set begin = ns ~ '<tool_call>' %}{{ begin + ns ~ '<invoke name=\"' }}", None),
        ("<|start_header_id|><|python_tag|>{{ '<function=' + f.name + '>' + f.arguments }}", None),
        *(
            (f"<tool_call>{text}", "hermes")
            for text in (
                "' + '\\n{\\\"name\\\": \\\"' + c.name",
                "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}",
                "\n{{ c.function | tojson }}\n</tool_call>",
            )
        ),
    ],
)
def test_published_descriptions_of_calls_choose_the_format(template, expected):
    assert choose_format(template, lambda text: None).name == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<|im_start|>assistant\\n<think>' }}", "</think>"),  # of OLMo 3 Think
        ("{{ content.split('</think>')[-1] }}", "</think>"),
        ("<|START_THINKING|>{{ reasoning }}<|END_THINKING|>", "<|END_THINKING|>"),
        ("[THINK][/THINK]", "[/THINK]"),
        ("<|im_start|>assistant\\n", None),
    ],
)
def test_either_marker_of_reasoning_in_a_template_chooses_the_reasoning(template, expected):
    thought = choose_format(template, lambda text: None).thought

    assert (thought and thought.end) == expected


ONE = f'{{"name": "find", "arguments": {JSON}}}'
TWO = f'{ONE}, {{"name": "stop"}}'


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", f"[TOOL_CALLS] {TWO}"),
        ("mistral", f"[TOOL_CALLS] [TOOL_CALLS] [{TWO}]"),
        ("mistral", f"[TOOL_CALLS][TOOL_CALLS]{TWO}"),
        ("granite", f"<|tool_call|>{TWO}"),
        ("hunyuan", f"<tool_calls>{TWO}</tool_calls>"),
        ("hunyuan", f"<tool_calls>\n{TWO}\n</tool_calls>"),
        ("hermes", f"<tool_call>\n[{TWO}]\n</tool_call>"),
        ("glm45", f"<tool_call>{TWO}</tool_call>"),
        ("qwen3_coder", f"<tool_call>\n[{TWO}]\n</tool_call>"),
        ("seed_oss", f"<seed:tool_call>\n{TWO}\n</seed:tool_call>"),
        ("hermes", f"<tool_call>{TWO}</tool_call>"),
        (
            "cohere2",
            f"<|START_ACTION|>\n{TWO}<|END_ACTION|>".replace('"name"', '"tool_name"'),
        ),
    ],
)
@given(sizes=SIZES)
def test_calls_may_be_a_list_or_not(name, text, has_tokens, sizes):
    form = make_format(name, has_tokens=has_tokens)

    assert read(form, f"I look.{text}", sizes) == Message("I look.", calls=[FOUND, STOPPED])
    lines = text.replace('}, {"', '}\n{"')
    assert read(form, f"I look.{lines}", sizes) == Message("I look.", calls=[FOUND, STOPPED])
    single = text.replace(', {"name": "stop"}', "").replace(', {"tool_name": "stop"}', "")
    assert read(form, f'{single} {{"a": 1}}', sizes) == Message('{"a": 1}', calls=[FOUND])
    assert read(form, f"{single} Done.", sizes) == Message("Done.", calls=[FOUND])


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS]{"a": 1}'),
        ("mistral", "[TOOL_CALLS] [TOOL_CALLS] {"),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]is a marker"),
        ("granite", '<|tool_call|>{"a": {"name": "find"}}'),
        ("hunyuan", '<tool_calls>{"a": 1}</tool_calls>'),
        ("hermes", '<tool_call>[1, {"name": "stop"}]</tool_call>'),
        ("glm45", '<tool_call>{"a": 1}</tool_call>'),
        ("qwen3_coder", "<tool_call>[</tool_call>"),
        ("cohere2", '<|START_ACTION|>{"name": 1}<|END_ACTION|>'),
    ],
)
def test_json_that_is_no_call_is_text(name, text, has_tokens):
    assert read(make_format(name, has_tokens=has_tokens), text) == Message(text)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("end", ["</{0}function_calls>", ""])
@pytest.mark.parametrize(("name", "mark"), [("deepseek_v32", "｜DSML｜"), ("minimax_m2", "")])
@given(sizes=SIZES)
def test_calls_in_tags_may_lack_the_first_tag(name, mark, end, has_tokens, sizes):
    form = make_format(name, has_tokens=has_tokens)
    if not mark:
        end = end and "</minimax:tool_call>"
    call = '<{0}invoke name="find">\n<{0}parameter name="n">1</{0}parameter>\n</{0}invoke>\n'
    text = f'I look.\n{call}<{{0}}invoke name="stop"></{{0}}invoke>{end}'.format(mark)

    expected = [("find", '{"n": 1}', True), STOPPED]
    assert read(form, text, sizes) == Message("I look.", calls=expected)
    for other in ('<{0}invoke name="other">x</{0}invoke>', "<{0}invoke is a tag>", "<{0}invoke"):
        assert read(form, other.format(mark), sizes) == Message(other.format(mark))


CALLS = {
    "llama3_json": f'{{"name": "find", "parameters": {JSON}}}; {{"name": "stop"}}',
    "pythonic": '[find(n=1, text="a\\"}{\\n ü", more={"k": [1, 2]}), stop()]',
}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "tag"), [("llama3_json", "<|python_tag|>"), ("pythonic", "<|python_start|>")]
)
@given(sizes=SIZES)
def test_a_tag_announces_calls_after_text(name, tag, has_tokens, sizes):
    form, text = make_format(name, has_tokens=has_tokens), f"I look.\n\n{tag}{CALLS[name]}"

    assert read(form, text, sizes) == Message("I look.", calls=[FOUND, STOPPED])
    twice = read(form, f"{text} {tag} {CALLS[name]}", sizes)
    assert twice == Message("I look.", calls=[FOUND, STOPPED] * 2)
    for other in (
        f"a {tag} is a tag",
        f"a {tag}{CALLS[name].replace('find', 'other')}",
        f"a {tag}",
    ):
        assert read(form, other, sizes, tools={"find": {}}) == Message(other)
    if name == "llama3_json":
        lines = CALLS[name].replace("; ", "\n")
        assert read(form, f'{lines} {{"a": 1}}', sizes) == Message(
            '{"a": 1}', calls=[FOUND, STOPPED]
        )
    untagged = text.replace(tag, "")
    assert read(form, untagged, sizes) == Message(untagged)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "tag"), [("llama3_json", "<|python_tag|>"), ("pythonic", "<|python_start|>")]
)
def test_text_beside_strict_tools_has_no_tag(name, tag, has_tokens):
    walk = Walk(name, TOOLS, has_tokens=has_tokens)
    form = walk.form.structured(None, TOOLS, ["stop"])
    assert form is not None

    assert walk.allows(form, walk.tokens("a <|python"))
    assert not walk.allows(form, walk.tokens(f"a {tag}"))


ANSWER = "<|start|>assistant<|channel|>final<|message|>Yes"


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("<|channel|>commentary to=python <|constrain|>code", Message("Yes", "stop()")),
        ("assistant to=container.exec<|channel|>commentary", Message("Yes", "stop()")),
        ("<|channel|>commentary to=assistant<|channel|>analysis", Message("Yes", "stop()")),
        ("<|channel|>commentary to=user", Message("stop()Yes")),
        ("<|channel|>commentary to=assistant<|channel|>final", Message("stop()Yes")),
        (
            "<|channel|>analysis to=functions.other code",
            Message("Yes", calls=[("other", "stop()", True)]),
        ),
        ("<|channel|>commentary to=stop", Message("Yes", calls=[("stop", "stop()", True)])),
    ],
)
def test_only_messages_of_gpt_oss_to_functions_are_calls(head, expected, has_tokens):
    form = make_format("gpt_oss", has_tokens=has_tokens)
    text = f"{head}<|message|>stop()<|end|>{ANSWER}"

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == expected
    assert not read(form, text, tools=None).calls


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("I look.\n\n", "\nDone.", "I look.\nDone."),
        ("I look. ", "Done.", "I look. Done."),
        ("I look.", "Done.", "I look.\nDone."),  # content: the line break
        ("I look.\n", "", "I look."),
        ("", "\nDone.", "Done."),
        ("\n", "\nDone.\n", "Done."),
    ],
)
def test_white_space_before_a_call_divides_the_texts_around_it(before, after, expected, has_tokens):
    call = "<tool_call>stop\n</tool_call>"
    text = f"{before}{call}\n{call}{after}"

    for sizes in ((1,), (2, 3), (100,)):
        found = read(make_format("glm45", has_tokens=has_tokens), text, sizes)
        assert found == Message(expected, calls=[STOPPED] * 2)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("name", "mark", "outer"),
    [
        ("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls"),
        ("minimax_m2", "", "minimax:tool_call"),
    ],
)
@given(sizes=SIZES)
def test_arguments_between_tags_may_be_json(name, mark, outer, has_tokens, sizes):
    form = make_format(name, has_tokens=has_tokens)
    find = f'<{mark}invoke name="find">\n{JSON}\n</{mark}invoke>'
    stop = f'<{mark}invoke name="stop">{{}}</{mark}invoke>'

    found = read(form, f"I look.<{outer}>\n{find}\n{stop}\n</{outer}>", sizes)

    assert found == Message("I look.", calls=[FOUND, STOPPED])
    cut = read(form, f'<{outer}><{mark}invoke name="find">{{"n": 1, "te', sizes)
    assert cut == Message(calls=[("find", '{"n": 1, "te', False)])


@pytest.mark.parametrize(
    "text",
    [
        "<arg_key>n</arg_key><arg_value>1<arg_key>text</arg_key><arg_value>a</tool_call>",
        "<arg_key>n<arg_value>1</arg_value><arg_key>text<arg_value>a</arg_value></tool_call>",
        "<arg_key>n<arg_value>1<arg_key>text\n<arg_value>a</tool_call>",
    ],
)
def test_end_tags_of_glm_may_be_missing(text):
    form = make_format("glm45", has_tokens=True)

    for sizes in ((1,), (2, 3), (100,)):
        found = read(form, f"<tool_call>find\n{text}", sizes)
        assert found == Message(calls=[("find", '{"n": 1, "text": "a"}', True)])


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|channel|>final {"n": 1}<|return|>', Message('{"n": 1}')),
        (
            "<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final[1]",
            Message("[1]", "hm"),
        ),
        (
            f"<|channel|>commentary to=functions.stop {{}}<|end|>{ANSWER}",
            Message("Yes", calls=[STOPPED]),
        ),
        (
            f"<|channel|>commentary to=functions.stop <|constrain|>json{{}}<|call|>{ANSWER}",
            Message("Yes", calls=[STOPPED]),
        ),
        (f"<|channel|>final {'long ' * 100}<|end|>", Message("long " * 100)),
        # The answer ends before the header of its second message is complete.
        ("<|channel|>final<|message|>Yes<|end|><|start|>assistant<|channel|>final", Message("Yes")),
        ("<|channel|>final<|message|>Yes<|end|><|start|>assistant<|channel|>fi", Message("Yes")),
        ("<|channel|>comm", Message()),
        (
            f"<|channel|>commentary to=functions.stop {'x' * 300}<|end|>{ANSWER}",
            Message(f"<|channel|>commentary to=functions.stop {'x' * 300}Yes"),
        ),
        ("<|channel|>commentary to=functions.stop <|constrain|>js", Message()),
    ],
)
def test_the_head_of_a_message_of_gpt_oss_may_lack_its_marker(text, expected, has_tokens):
    form = make_format("gpt_oss", has_tokens=has_tokens)

    for sizes in ((1,), (2, 3), (100,)):
        assert read(form, text, sizes) == expected


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_line_break_divides_messages_of_reasoning_of_gpt_oss(has_tokens):
    thought = "<|channel|>analysis<|message|>{}<|end|>"
    text = f"{thought.format('one')}<|start|>assistant{thought.format('two')}{ANSWER}"

    for sizes in ((1,), (2, 3), (100,)):
        found = read(make_format("gpt_oss", has_tokens=has_tokens), text, sizes)
        assert found == Message("Yes", "one\ntwo")
