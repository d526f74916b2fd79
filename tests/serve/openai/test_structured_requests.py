"""If a request demands an output format, it is refused, or the format's grammar is sent to the
engine.
"""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from dist_aclgraph.formats.choice import AnswerFormat
from dist_aclgraph.sampling import StructuredOutputs
from dist_aclgraph.serve.openai import state
from dist_aclgraph.text import structure
from tests.serve.conftest import until
from tests.serve.openai.test_errors import assert_error
from tests.serve.openai.test_tools import HI, WEATHER, ask
from tests.serve.tooled import MODEL

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
CLOSED = {"type": "array", "items": SCHEMA}
LETTERS = "abcdefghijklmnopqrstu"  # there are 21 ** 3 texts of three letters
AMBIGUOUS = "start: r0\n" + "\n".join(
    f'r{i}: (r{(7 * i + 1) % 99} | "") (r{(11 * i + 3) % 99} | "x") r{5 * i % 99} | /[a-z]/'
    for i in range(99)
)
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def structure_of(service):
    """Return the ``structure`` field of the last request that the engine has received."""
    until(lambda: service.engine.num_running == 0)
    return service.engine.submitted[-1].sampling.structure


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": FORMAT}, '"b":{"type":"integer"},"a"'),
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json_object", "schema": None}}, '"type":"object"'),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json", "value": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"integer"'),
        ({"response_format": {"type": "regex", "value": "a+b"}}, "a+b"),
        ({"response_format": {"type": "regex", "pattern": "a+b"}}, "a+b"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "x"'}}, 'start: "x"'),
        ({"structured_outputs": {"json": SCHEMA}}, '"integer"'),
        (
            {"structured_outputs": {"json": CLOSED, "disable_additional_properties": True}},
            '"items":{"additionalProperties":false,"type":"object","properties"',
        ),
        ({"structured_outputs": {"regex": "a+b"}}, "a+b"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes" | "no"'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, 'start: "x"'),
        ({"structured_outputs": {"json_object": True}}, '"type":"object"'),
        ({"guided_json": SCHEMA}, '"integer"'),
        ({"guided_json": json.dumps(SCHEMA)}, '"integer"'),
        ({"guided_regex": "a+b"}, "a+b"),
        ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
        ({"guided_grammar": 'start: "x"'}, 'start: "x"'),
        ({"json_schema": json.dumps(SCHEMA)}, '"integer"'),
        ({"regex": "a+b"}, "a+b"),
        ({"ebnf": 'root ::= "x"'}, 'start: "x"'),
    ],
)
def test_every_name_of_a_form_reaches_the_engine_as_a_grammar(service, fields, part):
    service.answer("x")

    ask(service, extra_body=fields)

    found = structure_of(service)
    assert part in found.grammar.replace('": ', '":').replace(', "', ',"')
    assert found.end_ids == service.state.tokenizer.eos_ids


def test_text_has_no_grammar(service):
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        ask(service, extra_body=fields, max_tokens=1)
        assert structure_of(service) is None


@pytest.mark.parametrize("schema", [{}, {"schema": None}])
def test_a_format_without_a_schema_is_any_json(service, schema):
    ask(service, extra_body={"response_format": {"type": "json_schema", "json_schema": schema}})

    assert '"json_schema":{"x-guidance"' in structure_of(service).grammar


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        # The library guidance 0.3 sends each grammar in two fields: one for older releases of vLLM,
        # and one for newer releases.
        ({"guided_grammar": 'start: "x"', "structured_outputs": {"grammar": 'start: "x"'}}, '"x"'),
        ({"guided_choice": ["yes"], "structured_outputs": {"choice": ["yes"]}}, '"yes"'),
        ({"guided_regex": "a+", "regex": "a+"}, "a+"),
        ({"guided_json": SCHEMA, "response_format": FORMAT}, '"integer"'),
    ],
)
def test_the_same_form_may_have_several_names(service, fields, part):
    service.answer("x")

    ask(service, extra_body=fields)

    assert part in structure_of(service).grammar.replace('": ', '":')


def test_completions_take_forms_too(service):
    service.openai.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=2,
        extra_body={"guided_regex": "[0-9]+", "cache_salt": "mine"},
    )

    found = structure_of(service)
    assert "[0-9]+" in found.grammar
    assert found.salt == "mine"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "no value matches",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern is missing"),
        ({"response_format": {"type": "grammar", "value": 5}}, "response_format.value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "json_schema.schema is missing; properties is beside it",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"const": "a" * (1 << 16)}}},
            "response_format has 65548 characters; at most 65536",
        ),
        ({"guided_regex": "a" * (1 << 17)}, "guided_regex has 131072 characters"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "both ask"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "both ask"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {}, "guided_json": "[1]"}, "must be a JSON schema"),
        ({"guided_regex": "(["}, "regex"),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_regex": "a" * 70_000}, "65536"),
        ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "takes more than 1 s"),
        ({"structured_outputs": {"json": False}}, "no value matches"),
        (
            {"guided_json": {"x-guidance": {"lenient": True}, "not": {"const": 1}}},
            "Unimplemented keys",
        ),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"guided_choice": ["".join(each) for each in product(LETTERS, repeat=3)]}, "items"),
        ({"guided_grammar": AMBIGUOUS}, "it is too ambiguous"),
        ({"thinking_tokens": -1}, "thinking_tokens"),
    ],
)
def test_output_formats_that_cannot_be_enforced_are_refused_in_one_sentence(service, fields, words):
    body = {"model": MODEL, "messages": HI, **fields}

    error = assert_error(service.http.post("/v1/chat/completions", json=body), 400)

    assert words in error["message"]
    assert len(error["message"]) < 700


def test_the_answer_ends_by_the_end_token_although_it_is_ignored(service):
    service.answer("x")

    reply = ask(service, extra_body={"guided_regex": "x", "ignore_eos": True})

    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", "any", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_that_are_required_are_a_grammar(tooled, choice):
    tooled.answer('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')

    reply = ask(tooled, tools=[WEATHER], tool_choice=choice)

    assert "weather" in structure_of(tooled).grammar
    assert reply.choices[0].finish_reason == ("tool_calls" if isinstance(choice, str) else "stop")


def test_required_calls_follow_their_schema_where_it_can_be_used(tooled):
    odd = {"type": "object", "properties": {"n": {"not": {"type": "string"}}}}
    parts = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 7}}}
    for schema, part in ((parts, '"maxLength": 7'), (odd, '{"type": "object"')):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        ask(tooled, tools=[tool], tool_choice="required", max_tokens=1)
        assert part in structure_of(tooled).grammar

    strict = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    body = {"model": MODEL, "messages": HI, "tools": [strict], "tool_choice": "required"}
    error = assert_error(tooled.http.post("/v1/chat/completions", json=body), 400)
    assert "not" in error["message"]


def test_tools_with_unusable_schemas_do_not_free_the_arguments_of_other_tools(tooled):
    odd = {"type": "object", "properties": {"n": {"not": {"type": "string"}}}}
    good = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 7}}}
    schemas = {"odd": odd, "good": good, "other": odd, "none": {"type": "nothing"}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    ask(tooled, tools=tools, tool_choice="required", max_tokens=1)

    grammar = structure_of(tooled).grammar
    assert '"maxLength": 7' in grammar
    assert grammar.count('%json {"type": "object", "x-guidance"') == 3

    tools[1]["function"]["strict"] = tools[2]["function"]["strict"] = True
    body = {"model": MODEL, "messages": HI, "tools": tools, "tool_choice": "required"}
    error = assert_error(tooled.http.post("/v1/chat/completions", json=body), 400)
    assert ": the tool other: " in error["message"]


def test_tools_and_a_form_are_alternatives(tooled):
    ask(tooled, tools=[WEATHER], response_format=FORMAT, max_tokens=1)

    grammar = structure_of(tooled).grammar
    assert "weather" in grammar
    assert " | " in grammar
    assert '"integer"' in grammar


def test_tools_that_are_not_strict_need_no_grammar(tooled):
    ask(tooled, tools=[WEATHER], max_tokens=1)

    assert structure_of(tooled) is None


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": [STRICT]}, "stop_token_ids, ignore_eos"),
        ({"response_format": FORMAT}, "stop_token_ids, ignore_eos"),
        ({"tools": [WEATHER]}, None),
    ],
)
def test_ends_that_a_grammar_replaces_are_named(tooled, fields, ignored):
    body = {"model": MODEL, "messages": HI, "max_tokens": 1, **fields}

    reply = tooled.http.post(
        "/v1/chat/completions", json=body | {"stop_token_ids": [7], "ignore_eos": True}
    )

    assert reply.is_success, reply.text
    assert reply.headers.get("x-ignored-parameters") == ignored


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_form_is_that_of_the_text_behind_the_reasoning(tooled, is_opened):
    ask(
        tooled,
        response_format=FORMAT,
        max_tokens=1,
        extra_body={"enable_thinking": is_opened, "thinking_tokens": 7},
    )

    found = structure_of(tooled)
    tokenizer = tooled.state.tokenizer
    assert found.is_thinking is is_opened
    assert found.think_begin == tokenizer.added_token("<think>")
    assert found.think_end == tokenizer.added_token("</think>")
    assert found.max_thought == 7


def test_a_limit_of_reasoning_that_the_format_does_not_have_is_refused(service, monkeypatch):
    monkeypatch.setattr(service.state, "answers", AnswerFormat("gpt_oss", None, {}))
    body = {"model": MODEL, "messages": HI, "thinking_tokens": 5}

    error = assert_error(service.http.post("/v1/chat/completions", json=body), 400)

    assert error["param"] == "thinking_tokens"
    assert "gpt_oss has no limit" in error["message"]
    # Clients of /v1/messages always send a limit of reasoning. The service ignores the limit if the
    # format has no limit.
    body = {"model": MODEL, "messages": HI, "max_tokens": 5}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert service.http.post("/v1/messages", json={**body, "thinking": thinking}).is_success


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_long_thought_may_be_continued(tooled, is_closed):
    begun = "<think>" + "I look. " * 60 + "</think>" * is_closed
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]

    tooled.openai.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=1,
        response_format=FORMAT,
        extra_body={"continue_final_message": True},
    )

    assert structure_of(tooled).is_thinking is not is_closed


def test_a_choice_may_have_thousands_of_texts(service):
    ask(service, extra_body={"guided_choice": [f"t{i}" for i in range(5000)]})

    assert '"t4999"' in structure_of(service).grammar


def test_a_process_that_died_is_replaced(service):
    ask(service, extra_body={"guided_regex": "first"})
    for process in service.state.grammars._idle:
        process._socket.shutdown(socket.SHUT_RDWR)

    ask(service, extra_body={"guided_regex": "second"})

    assert "second" in structure_of(service).grammar


def test_requests_that_wait_for_a_grammar_take_no_threads_from_others(service):
    """More requests wait for grammars than there are threads. Requests for plain text are still
    served.
    """
    compiler, go = service.state.grammars, threading.Event()
    compile_source = compiler.compile
    compiler.compile = lambda *args: (go.wait(60), compile_source(*args))[1]
    try:
        with ThreadPoolExecutor(40) as threads:
            fields = [{"guided_regex": f"a{i}"} for i in range(40)]
            waiting = [threads.submit(ask, service, extra_body=each) for each in fields]
            until(lambda: service.state._compiling._work_queue.qsize() >= 38)
            ask(service, max_tokens=1)
            assert not any(each.done() for each in waiting)
            go.set()
    finally:
        go.set()
        compiler.compile = compile_source


def test_a_grammar_does_not_wait_long_for_other_grammars(service, monkeypatch):
    compiler, begun, go = service.state.grammars, threading.Semaphore(0), threading.Event()
    compile_source = compiler.compile

    def compile_late(*args):
        begun.release()
        go.wait(60)
        return compile_source(*args)

    monkeypatch.setattr(compiler, "compile", compile_late)
    with ThreadPoolExecutor(2) as threads:
        try:
            fields = [{"guided_regex": f"b{i}"} for i in range(3)]
            first = [threads.submit(ask, service, extra_body=each) for each in fields[:2]]
            assert begun.acquire(timeout=60)
            assert begun.acquire(timeout=60)
            monkeypatch.setattr(state, "MAX_QUEUE_S", 0.01)
            body = {"model": MODEL, "messages": HI, **fields[2]}
            reply = service.http.post("/v1/chat/completions", json=body)
        finally:
            go.set()
        assert all(each.result() for each in first)

    assert reply.headers["retry-after"]
    assert "grammars of other requests" in assert_error(reply, 503)["message"]


def test_grammars_are_kept_up_to_a_number_of_characters(service, monkeypatch):
    monkeypatch.setattr(structure, "MAX_KEPT_CHARS", 500)
    compiler = structure.GrammarCompiler(service.state.tokenizer)
    sources = [StructuredOutputs(regex=letter * 40) for letter in "abc"]
    for source in (*sources[:2], sources[0], sources[2]):
        compiler.compile(source)

    assert [compiler.knows(source) for source in sources] == [True, False, True]


def test_an_error_names_the_tool_that_has_it(tooled):
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
        for name, parameters in (("good", {"type": "object"}), ("bad", {"not": {}}), ("last", {}))
    ]
    body = {"model": MODEL, "messages": HI, "tools": tools}

    error = assert_error(tooled.http.post("/v1/chat/completions", json=body), 400)

    assert error["message"].startswith("tools: the form of the answer cannot be used: the tool bad")


@pytest.mark.parametrize("name", ["guided_regex", "regex"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_error_names_the_field_that_was_sent(service, path, name):
    text = {"messages": HI} if "chat" in path else {"prompt": "a"}
    body = {"model": MODEL, name: "([", **text}

    error = assert_error(service.http.post(path, json=body), 400)

    assert error["param"] == name
    assert error["message"].startswith(f"{name}: ")
