"""Ordinary chat templates give the same text as in transformers. Hostile templates are stopped at a
limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.text.chat_template import (
    ChatOptions,
    ChatTemplate,
    RenderLimits,
    read_chat_template,
)
from dist_aclgraph.text.grammars import read_vocabulary
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.text.templates import make_template

MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3"
CONTENT = {"default": "{{ messages[0].content }}"}
HI = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Wie geht's? 你好 🙂\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGut."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_time", "arguments": {"zone": "Zürich", "n": 1}}}],
    },
    {"role": "tool", "content": '{"time": "12:00"}'},
    {"role": "user", "content": "Danke"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Return the time & date of a <zone>.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    }
]
DOCUMENTS = [{"title": "One", "text": "é"}, {"title": "Two", "text": "2 < 3"}]
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}{% continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
"""
COMMAND_R = """\
{% macro document(d, n) %}<doc id="{{ n }}" {{ d | items | list | length }}>{{ d.title | upper }}:
{{ d.text | indent(2) }}</doc>
{% endmacro %}
{% for d in documents or [] %}{{ document(d, loop.index) }}{% endfor %}
{% for m in messages if m.content %}
  {% if m.role == 'assistant' %}
    {% generation %}{{ m.content }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}
  {% else %}
    {{ '%-9s|' % m.role }}{{ m.content | replace('\\n', ' ') | tojson(sort_keys=true) }}
  {% endif %}
  {{- loop.cycle('a', 'b') }}{{ ['x', 'y'] | join('-') }}{{ 2 ** 10 }}
{% endfor %}
{{ {'b': 1, 'a': [none, true]} | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}
"""
TESTED = RenderLimits(cpu_s=0.2, memory_bytes=256 << 20)
DOUBLING = "{% set x = x ~ x %}" * 60
TOO_LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
REFUSED, TIME, MEMORY = "the chat template", "0.2 s of processor time", "256 MiB of memory"


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("source", [QWEN, LLAMA, COMMAND_R], ids=["qwen", "llama", "command-r"])
@pytest.mark.parametrize(
    ("tools", "documents"), [(None, None), (TOOLS, DOCUMENTS)], ids=["plain", "tools"]
)
def test_a_template_renders_as_with_transformers(source, tools, documents, add_generation_prompt):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    more = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
    (expected,), _ = render_jinja_template([CHAT], chat_template=source, **more, **special)

    assert make_template(source, special).render(CHAT, ChatOptions(**more)) == expected


@pytest.mark.parametrize("content", ["One", "One ", " One\n", "Öne <b>"])
@pytest.mark.parametrize("strip", ["", " | trim"])
@pytest.mark.parametrize("end", ["<|end|>", "", " x"])
def test_the_last_message_is_continued_as_with_transformers(content, strip, end):
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content" + strip + " }}" + end + "{% endfor %}"
    )
    chat = [*HI, {"role": "assistant", "content": content}]
    (expected,), _ = render_jinja_template(
        [chat], chat_template=source, continue_final_message=True
    )
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)

    assert make_template(source).render(chat, options) == expected


@pytest.mark.parametrize("source", ["no messages", "{{ messages[0].content }}"])
def test_a_message_that_the_template_leaves_out_cannot_be_continued(source):
    template = make_template(source)
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)

    with pytest.raises(InvalidParameterError, match="leaves out the end of the last message"):
        template.render([*HI, {"role": "assistant", "content": "One"}], options)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_the_names_that_templates_read(name):
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"

    text = make_template(source).render([{"role": "assistant", name: "hm"}])

    assert text == "hm|hm"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "mapping", "files"])
def test_a_checkpoint_may_have_templates_by_name(tmp_path, place):
    sources = {
        name: name + " of {{ bos_token }}{{ wish }}" for name in ("default", "tool_use", "rag")
    }
    described: Any = [{"name": name, "template": source} for name, source in sources.items()]
    if place == "mapping":
        described = sources
    if place == "files":
        described = []
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(sources["default"])
        for name in ("tool_use", "rag"):
            path = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            path.write_text(sources[name])
    template = read_chat_template(tmp_path, {"chat_template": described}, {"bos_token": "<s>"})
    assert template is not None

    assert template.render(HI) == "default of <s>"
    assert template.render(HI, ChatOptions(tools=TOOLS)) == "tool_use of <s>"
    chosen = ChatOptions(template="rag", variables={"wish": "!"})
    assert template.render(HI, chosen) == "rag of <s>!"
    with pytest.raises(InvalidParameterError, match="which has: default, rag, tool_use"):
        template.render(HI, ChatOptions(template="{{ messages }}"))
    with pytest.raises(InvalidParameterError, match="must not hold 'messages'"):
        template.render(HI, ChatOptions(variables={"messages": []}))


def test_tools_have_the_names_that_templates_read():
    template = make_template("{{ xml_tools }}")  # as SmolLM3's template names them

    assert template.render(HI, ChatOptions(tools=TOOLS)) == str(TOOLS)
    assert template.render(HI) == ""
    chosen = ChatOptions(tools=TOOLS, variables={"xml_tools": []})
    assert template.render(HI, chosen) == "[]"


def test_the_template_of_a_processor_is_used_if_there_is_no_other(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    alone = read_chat_template(tmp_path, {}, {})
    beside = read_chat_template(tmp_path, {"chat_template": "of the tokenizer"}, {})
    assert alone is not None
    assert beside is not None

    assert (alone.render(HI), beside.render(HI)) == ("of the processor", "of the tokenizer")


def test_a_file_replaces_the_templates_of_the_checkpoint(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("of the checkpoint")
    own = tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}{{ messages[0].content }}")

    template = read_chat_template(tmp_path, {}, {"bos_token": "<s>"}, path=own)

    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_engines_need_no_file_of_a_template():
    own = make_config({"model": str(MODEL)})
    absent = make_config({"model": str(MODEL), "chat_template": "/absent/on/this/node.jinja"})

    assert read_vocabulary(absent) == read_vocabulary(own)


def test_text_that_is_not_unicode_comes_back():
    template = ChatTemplate(CONTENT, {})

    assert template.render([{"role": "user", "content": "\ud800\x00"}]) == "\ud800\x00"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TOO_LONG, TIME),
        ("{{ ([range(99999)] * 10 ** 6) | map('sum') | list }}", TIME),
        ("{{ 7 ** (7 ** 9) }}", TIME),
        ("{{ lipsum(4000000) }}", TIME),
        ("{{ ([[0] * 2000] * 400000) | sum(start=[]) }}", TIME),
        ("{{ 'a' * 10 ** 9 }}", MEMORY),
        ("{{ [1] | batch(5 * 10 ** 8, 'x') | list }}", MEMORY),
        ("{{ range(99999) | join('x' * 9999) }}", MEMORY),
        ("{{ '%1000000000d' % 1 }}", MEMORY),
        ("{{ '{:1000000000d}'.format(1) }}", MEMORY),
        ("{{ ('a' * 4000000).translate({97: 'b' * 4000}) }}", MEMORY),
        ("{% set x = 'xx' %}" + DOUBLING, MEMORY),
        ("{% set x = 'xx' %}{% for i in range(40) %}{% set x %}{{ x }}{{ x }}{% endset %}"
         "{% endfor %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40, MEMORY),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "more than 4194304 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 1 | nofilter }}", "No filter named 'nofilter'"),
        ("{{ raise_exception('only users') }}", "refuses the messages: only users"),
        ("{{ messages[0].content + 1 }}", "cannot render the messages: TypeError"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_a_template_without_bounds_is_refused(source, words):
    # On a busy machine, a template needs more CPU time to fill the memory.
    limits = replace(TESTED, cpu_s=20) if words is MEMORY else TESTED
    template = ChatTemplate({"default": source}, {}, limits)
    begun_s = time.monotonic()

    with pytest.raises(InvalidParameterError, match=words) as caught:
        template.render(HI)

    assert caught.value.param == "messages"
    assert str(caught.value).startswith(REFUSED)
    assert time.monotonic() - begun_s < TESTED.wait_s


def test_a_render_at_its_limit_leaves_the_others_alone():
    source = "{% if messages[0].content == 'loop' %}" + TOO_LONG + "{% endif %}fine"
    template = ChatTemplate({"default": source}, {}, RenderLimits(cpu_s=1))
    refused = []

    def loop():
        with pytest.raises(InvalidParameterError) as caught:
            template.render([{"role": "user", "content": "loop"}])
        refused.append(caught.value)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(9):
        assert template.render(HI) == "fine"
    assert not refused
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    assert template.render(HI) == "fine"


def test_a_process_serves_one_render_after_the_other_until_it_is_killed():
    template = ChatTemplate(CONTENT, {})
    template.render(HI)
    (first,) = template._idle
    template.render(HI)
    assert template._idle == [first]

    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)

    assert template.render(HI) == "Hi"
    assert template._idle != [first]


def test_a_process_that_hangs_is_given_up():
    template = ChatTemplate(CONTENT, {}, RenderLimits(wait_s=3))
    template.render(HI)
    (process,) = template._idle

    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(InvalidParameterError, match="takes more than 3 s"):
        template.render(HI)

    assert template.render(HI) == "Hi"


def test_the_process_ends_with_its_template():
    template = ChatTemplate(CONTENT, {})
    template.render(HI)
    (process,) = template._idle
    del template

    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"chat_template": 5}, "it must be a text"),
        ({"chat_template": [{"name": "default", "template": {}}]}, "it must be a text"),
        ({"chat_template": "{% if %}"}, "does not compile"),
        ({"chat_template": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, "does not compile"),
    ],
)
def test_an_invalid_template_is_a_model_error(tmp_path, described, words):
    with pytest.raises(ModelError, match=words):
        read_chat_template(tmp_path, described, {})


@pytest.mark.parametrize("listed", [[], [{"name": "default"}], [{}], [5], [{"name": "tool"}]])
def test_a_list_without_the_template_is_none(tmp_path, listed):
    assert read_chat_template(tmp_path, {"chat_template": listed}, {}) is None


def test_a_binary_template_is_a_model_error(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(bytes(range(256)))

    with pytest.raises(ModelError, match="is not UTF-8 text"):
        Tokenizer(tmp_path)
