"""Templates that no honest model has: each is refused, soon, and with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.text.chat_template import ChatTemplate, read_chat_template
from dist_aclgraph.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3"
HI = [{"role": "user", "content": "Hi"}]
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set x = x ~ x %}" * 60


@pytest.mark.parametrize(
    "source",
    [
        FOREVER,
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(80) }}",
        "{% for a in [[1, 2]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{% set x = 'xx' %}" + DOUBLING,
        "{% set x = 'xx' %}" + DOUBLING.replace("~", "+"),
        "{% set x = [1, 2] %}" + DOUBLING.replace("~", "+") + "{{ x }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 9 ** 99999 }}",
        "{{ 'x' | center(1000000000000) }}",
        "{{ 'x'.ljust(1000000000000) }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '{:1000000000000d}'.format(1) }}",
        "{% set x = 'x' * 99999 %}{{ x.replace('x', x) }}",
        "{% set x = 'x' * 99999 %}{{ x.join([1] * 99999) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
    ],
    ids=lambda source: source[:40],
)
def test_a_template_without_bounds_is_refused(source):
    template = ChatTemplate(source, {})

    with pytest.raises(InvalidParameterError, match="the chat template"):
        template.render(HI)


def test_what_honest_templates_do_is_as_it_was():
    source = (
        "{% set ns = namespace(n=0) %}{%- macro tag(x) -%}<{{ x ~ '>' }}{%- endmacro -%}"
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{{ loop.index }}{{ tag(m.role) + m.content * 2 }}{% set ns.n = ns.n + 1 %}"
        "{{ ' %d' % ns.n }}{{ m | tojson(indent=1) }}{{ ['a', 'b'] | join('-') | indent(2) }}"
        "{% endfor %}{{ 2 ** 10 }}{{ bos_token }}"
    )

    text = ChatTemplate(source, {"bos_token": "<s>"}).render(HI)

    shown = json.dumps(HI[0], indent=1)
    assert text == f"1<user>HiHi 1{shown}a-b1024<s>"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"chat_template": 5}, "it must be a text"),
        ({"chat_template": [{"name": "default", "template": {}}]}, "it must be a text"),
        ({"chat_template": "{% if %}"}, "does not compile"),
        ({"chat_template": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, "does not compile"),
    ],
)
def test_what_is_no_template_is_a_model_error(tmp_path, described, words):
    with pytest.raises(ModelError, match=words):
        read_chat_template(tmp_path, described)


@pytest.mark.parametrize("listed", [[], [{"name": "default"}], [{}], [5], [{"name": "tool"}]])
def test_a_list_without_the_template_is_none(tmp_path, listed):
    assert read_chat_template(tmp_path, {"chat_template": listed}) is None


def test_a_binary_template_is_a_model_error(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(bytes(range(256)))

    with pytest.raises(ModelError, match="is not UTF-8 text"):
        Tokenizer(tmp_path)
