"""A chat template gets the contents of messages in the form that the template expects: one text, or
a list of parts.
"""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.text.chat_template import ChatOptions
from tests.text.templates import make_template

PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
OVER_PARTS = "{% for part in CONTENT %}[{{ part['text'] }}]{% endfor %}"
READS_TEXTS = {
    "text": "{{ messages[0].content + '!' }}",
    "text in lines": "{% for line in messages[0].content.split('.') %}{{ line }}{% endfor %}",
    "tool calls": "{% set calls = messages[0].content %}{% if calls is mapping %}"
    "{% for call in calls %}{{ call.id }}{% endfor %}{% else %}{{ calls + '!' }}{% endif %}",
    "types of others": "{% for tool in tools or [] %}{{ tool.type }}{% endfor %}"
    "{% for letter in messages[0].content %}{{ messages[0].type }}{{ letter }}{% endfor %}",
}
READS_PARTS = {
    "loop": OVER_PARTS.replace("CONTENT", "messages[0].content"),
    "filtered": OVER_PARTS.replace(
        "CONTENT", "messages[0]['content'] | selectattr('type', 'equalto', 'text')"
    ),
    "variable": "{% set c = messages[0].get('content') %}" + OVER_PARTS.replace("CONTENT", "c"),
    "macro": "{% macro shown(it) %}" + OVER_PARTS.replace("CONTENT", "it") + "{% endmacro %}"
    "{{ shown(messages[0].content if true else '') }}",
    "first part": "{{ messages[0].content[0].text }}",
}
READS_BOTH = {
    "either": "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    + READS_PARTS["loop"]
    + "{% endif %}",
}


def rendered(source, content, role="user", **options):
    template = make_template(source)
    options = {"add_generation_prompt": False, **options}
    return template.render([{"role": role, "content": content}], ChatOptions(**options))


def expected(source, content, **options):
    chat = [[{"role": "user", "content": content}]]
    return render_jinja_template(chat, chat_template=source, **options)[0][0]


@pytest.mark.parametrize("source", READS_TEXTS.values(), ids=READS_TEXTS)
def test_a_template_that_reads_texts_gets_parts_as_lines(source):
    assert rendered(source, PARTS) == expected(source, "One.\nTwo.")


@pytest.mark.parametrize("source", READS_PARTS.values(), ids=READS_PARTS)
def test_a_template_that_reads_parts_gets_them_and_a_text_as_one_part(source):
    assert rendered(source, PARTS) == expected(source, PARTS)
    assert rendered(source, "One.") == expected(source, PARTS[:1])


@pytest.mark.parametrize("source", READS_BOTH.values(), ids=READS_BOTH)
@pytest.mark.parametrize("content", ["One.", PARTS], ids=["text", "parts"])
def test_a_template_that_reads_texts_and_parts_gets_the_content_unchanged(source, content):
    assert rendered(source, content) == expected(source, content)


@pytest.mark.parametrize("source", [READS_PARTS["loop"], READS_BOTH["either"]])
def test_the_last_part_is_continued(source):
    parts = [*PARTS, {"type": "image"}]

    text = rendered(source, parts, continue_final_message=True)

    assert text == expected(source, parts, continue_final_message=True)


def test_a_message_that_is_shown_twice_is_continued_without_a_mark():
    source = "{{ messages[0].content }}|{{ messages[0].content }}"

    assert rendered(source, "One.", continue_final_message=True) == "One.|One."


@pytest.mark.parametrize(
    ("end", "role"), [("", "system"), ("{% if role == 'developer' %}{% endif %}", "developer")]
)
def test_a_developer_is_the_system_in_templates_without_developers(end, role):
    assert rendered("{{ messages[0].role }}" + end, "One.", role="developer") == role


ROLES = {
    "written": "<{{ messages[0]['role'] }}>",
    "in a variable": "{% set r = messages[0].role if true else '' %}{{ '<' + r + '>' }}",
    "compared": "{% if messages[0]['role'] == 'document' %}<document>{% endif %}",
    "in a list": "{% if messages[0].role in ['a', 'document'] %}<document>{% endif %}",
    "in a namespace": "{% set ns = namespace(r='') %}{% set ns.r = messages[0].role %}<{{ ns.r }}>",
    "by a filter": "{% for m in messages | selectattr('role', 'equalto', 'document') %}<document>"
    "{% endfor %}",
    "by its beginning": "{% if messages[0].role.startswith('document') %}<document>{% endif %}",
    "in a text": "{% if messages[0].role in 'user document' %}<document>{% endif %}",
    "by a variable": "{% set r = messages[0].role %}{% if 'document' == r %}<document>{% endif %}",
}


@pytest.mark.parametrize("source", ROLES.values(), ids=ROLES)
def test_a_message_may_have_each_role_that_the_template_knows(source):
    assert rendered(source, "One.", role="document") == "<document>"


@pytest.mark.parametrize(
    "source",
    [
        "{% if messages[0]['role'] == 'user' %}{{ messages[0].content }}{% endif %}",
        "{{ messages[0].role == 'user' }}{{ messages[0]['role'] == 'documents' }}",
        "{{ messages[0].content }}{% if false %}{{ raise_exception(messages[0].role) }}{% endif %}",
    ],
)
@pytest.mark.parametrize("role", ["document", "User", "role"])
def test_a_role_that_the_template_does_not_know_is_refused(source, role):
    with pytest.raises(InvalidParameterError, match=f"messages.0.role is '{role}'") as caught:
        rendered(source, "One.", role=role)

    assert caught.value.param == "messages.0.role"


@pytest.mark.parametrize(
    ("end", "role"),
    [("", "tool"), ("{% if 'function' == messages[0].role %}{% endif %}", "function")],
)
def test_the_older_role_of_a_result_is_the_tool_in_templates_without_it(end, role):
    source = "{% set f = {'type': 'function'} %}{{ messages[0].role }}" + end

    assert rendered(source, "One.", role="function") == role
