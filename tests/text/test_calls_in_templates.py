"""A chat template gets the calls of earlier messages in the form that the template expects."""

from __future__ import annotations

import json

import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.text.chat_template import ChatOptions
from tests.text.templates import make_template

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
RAISES = "{{ raise_exception(m.content or 'none') }}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "ü"}'),
        ("{{ 'x' + c.function.arguments }}", 'x{"a": "ü"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=ü"),
        ("{% if m.content is none %}{{ 'x' + c.function.arguments }}{% endif %}", 'x{"a": "ü"}'),
        ("{{ m.content + c.function.name }}", "f"),
        ("{{ m.content + c.function.arguments }}", '{"a": "ü"}'),
        ("{{ m.content | trim }}{{ c.function.name }}", "f"),
    ],
)
@pytest.mark.parametrize("arguments", [{"a": "ü"}, '{"a": "ü"}'], ids=["object", "text"])
def test_arguments_and_contents_have_the_form_that_the_template_reads(body, expected, arguments):
    template = make_template(LOOP + body + END)
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    calling = {**CALLING, "tool_calls": [call]}

    assert template.render([{"role": "user", "content": "x"}, calling]) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"function": {"arguments": " "}}, "{}"),
        ({"function": {"arguments": None}}, "{}"),
        ({"function": {"arguments": "[1"}}, '"[1"'),
        ({"function": {"arguments": "[1]"}}, '"[1]"'),
        ({"function": 3}, '"none"'),
    ],
)
def test_arguments_that_are_no_object_are_not_changed(call, expected):
    body = "{{ c.function.arguments | default('none') | tojson }}"
    template = make_template(LOOP + body + END)

    assert template.render([{**CALLING, "tool_calls": [call]}]) == expected


@pytest.mark.parametrize("call_id", ["call_0123456789", "1", "aB3dE5gH7"])
def test_a_template_that_refuses_long_ids_gets_nine_characters(call_id):
    """Mistral's templates refuse calls and results whose id does not have nine characters."""
    refuses = "{% if id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}{{ id }} "
    body = (
        "{% for m in messages %}{% set id = m.tool_call_id %}{% if id %}" + refuses + "{% endif %}"
        "{% for c in m.tool_calls or [] %}{% set id = c.id %}" + refuses + END
    )
    result = {"role": "tool", "tool_call_id": call_id, "content": "3"}
    messages = [{**CALLING, "tool_calls": [{**CALL, "id": call_id}]}, result]

    of_call, of_result = make_template(body).render(messages).split()

    assert of_call == of_result
    assert of_call.isalnum()
    assert (of_call == call_id) == (call_id == "aB3dE5gH7")


OBSERVES = (
    "{% for m in messages %}<{{ m.get('metadata', '') if m.role == 'assistant' }}>"
    "{% if m.role == 'observation' %}sees {% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("content", [None, "I look."])
def test_calls_may_be_messages_whose_metadata_is_the_name(content):
    """GLM-4-0414's template reads calls, and results of tools, in this form."""
    calling = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}

    text = make_template(OBSERVES).render([calling, result, {"role": "user", "content": "x"}])

    said = "" if content is None else f"<>{content}"
    assert text == f'{said}<f>{{"a": "ü"}}<f>{{"a": "ü"}}<>sees 3<>x'
    as_text = {**CALL, "function": {"name": "f", "arguments": "[1"}}
    assert make_template(OBSERVES).render([{**calling, "tool_calls": [as_text]}]) == f"{said}<f>[1"


FUNCTION = {"name": "f", "description": "Finds.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "x"}
OWN_TOOLS = {
    "text": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if 'tools' in m %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{% endfor %}",
    "list": "{% for m in messages %}{% if m['tools'] is defined %}{% set tools = m['tools'] %}"
    "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "<{{ m['role'] }}>{{ m['metadata'] }} {{ m['content'] }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("form", "system", "expected"),
    [
        (
            "text",
            None,
            "<system>You are a helpful assistant with some tools.<|tool|>[{}]<|/tool|><user>x",
        ),
        ("text", "Be kind.", "<system>Be kind.<|tool|>[{}]<|/tool|><user>x"),
        ("list", None, "[f]<system> <user> x"),
        ("list", "Be kind.", "[f]<system> Be kind.<user> x"),
    ],
)
def test_tools_may_be_a_part_of_the_first_message(form, system, expected):
    """The templates of Phi-4-mini and GLM-4-9B read the tools in the first message."""
    template = make_template(OWN_TOOLS[form])
    messages = [USER] if system is None else [{"role": "system", "content": system}, USER]

    text = template.render(messages, ChatOptions(tools=TOOLS))

    assert text == expected.replace("{}", json.dumps(FUNCTION))
    assert "system" not in template.render([USER])
    with_variable = make_template(OWN_TOOLS[form] + "{{ tools | length }}")
    assert form == "list" or with_variable.render([USER], ChatOptions(tools=TOOLS)) == "<user>x1"


def test_calls_are_text_if_a_template_of_phi_reads_no_calls():
    messages = [CALLING, {**CALLING, "content": "I look."}, {"role": "tool", "content": "3"}]
    call = '<|tool_call|>[{"name": "f", "arguments": {"a": "ü"}}]<|/tool_call|>'

    text = make_template(OWN_TOOLS["text"]).render(messages)

    assert text == f"<assistant>{call}<assistant>I look.{call}<tool>3"


def test_a_template_may_read_the_functions_of_the_tools():
    """The first template that Apertus published reads ``tool.description``, and not
    ``tool.function``.
    """
    body = "{% for tool in tools %}{{ '// ' + tool.description + tool.name }}{% endfor %}"
    function = {"name": "f", "description": "Finds."}
    options = ChatOptions(tools=[{"type": "function", "function": function}])

    assert make_template(body).render([{"role": "user", "content": "x"}], options) == "// Finds.f"
    refuses = make_template("{{ raise_exception(tools[0].type or 'no type') }}")
    with pytest.raises(InvalidParameterError, match="function"):
        refuses.render([{"role": "user", "content": "x"}], options)


def test_the_error_is_that_of_the_first_form():
    template = make_template(LOOP + RAISES + END)

    with pytest.raises(InvalidParameterError, match="none"):
        template.render([CALLING])
