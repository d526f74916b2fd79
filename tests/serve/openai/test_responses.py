"""POST /v1/responses, with the openai client and a fake engine."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from tests.serve.conftest import serving
from tests.serve.http.test_hostile_bodies import filled
from tests.serve.openai.test_errors import assert_error
from tests.serve.openai.test_tools import CALLS
from tests.serve.tooled import MODEL

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "clock"}
THOUGHT = "<think>\nhm, 2\n</think>\n\nFour."


def ask(service, **options):
    options.setdefault("input", "Hi")
    return service.openai.responses.create(model=MODEL, **options)


def prompt_of(service) -> str:
    return service.state.tokenizer.decode(
        unpack_ints(service.engine.submitted[-1].prompt).tolist(), skip_special_tokens=False
    )


def without_ids(value):
    """Return the JSON of output items, without ids and without the fields that the client adds."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, dict):
        return value
    left_out = ("id", "call_id", "parsed", "parsed_arguments")
    return {k: without_ids(v) for k, v in value.items() if k not in left_out}


def events_of(service, **options):
    """Request a stream; return its events, and the response that the client builds from them."""
    options.setdefault("input", "Hi")
    with service.openai.responses.stream(model=MODEL, **options) as stream:
        return list(stream), stream.get_final_response()


@pytest.mark.parametrize(
    ("answer", "types"),
    [
        ("Hello there.", ["message"]),
        (THOUGHT, ["reasoning", "message"]),
        (CALLS, ["message", "function_call", "function_call"]),
        ("<think>\nI look.</think>" + CALLS[8:], ["reasoning", "function_call", "function_call"]),
        ("", ["message"]),
    ],
)
def test_a_stream_says_the_same_as_a_whole_response(tooled, answer, types):
    tooled.answer(answer)

    whole = ask(tooled, tools=[WEATHER, CLOCK])
    events, streamed = events_of(tooled, tools=[WEATHER, CLOCK])

    assert [item.type for item in whole.output] == types
    assert without_ids(streamed.output) == without_ids(whole.output)
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage
    assert (whole.status, streamed.status) == ("completed", "completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({item.id for item in whole.output}) == len(types)


def test_the_parts_of_an_answer(tooled):
    tooled.answer("<think>\nI look.</think>" + CALLS)

    reply = ask(tooled, tools=[WEATHER, CLOCK])

    thought, text, weather, clock = reply.output
    assert [part.text for part in thought.content] == ["I look."]
    assert [part.text for part in text.content] == ["I look."]
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Rom"})
    assert (clock.name, clock.arguments) == ("clock", "{}")
    assert weather.call_id != clock.call_id
    assert {item.status for item in reply.output} == {"completed"}
    assert reply.usage.output_tokens_details.reasoning_tokens > 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


def test_the_events_of_each_item_come_in_order(tooled):
    tooled.answer("<think>\nI look.</think>Yes.\n" + CALLS[8:])

    stream = ask(tooled, tools=[WEATHER, CLOCK], stream=True)

    kinds: list[str] = []
    for event in stream:
        kind = event.type.removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]

    def text(name: str) -> list[str]:
        parts = ["content_part.added", f"{name}.delta", f"{name}.done", "content_part.done"]
        return ["output_item.added", *parts, "output_item.done"]

    assert kinds == [
        "created",
        "in_progress",
        *text("reasoning_text"),
        *text("output_text"),
        *call,
        *call,
        "completed",
    ]


def test_the_response_repeats_the_fields_of_the_request(tooled):
    tooled.answer("Hello.")

    reply = ask(
        tooled,
        instructions="Be brief.",
        metadata={"a": "b"},
        store=True,
        temperature=0.5,
        max_output_tokens=50,
        tools=[CLOCK],
        tool_choice="auto",
        parallel_tool_calls=False,
        truncation="auto",
    )

    assert (reply.object, reply.status, reply.model) == ("response", "completed", MODEL)
    assert (reply.instructions, reply.metadata, reply.store) == ("Be brief.", {"a": "b"}, False)
    assert (reply.temperature, reply.max_output_tokens) == (0.5, 50)
    assert [tool.name for tool in reply.tools] == ["clock"]
    assert reply.parallel_tool_calls is False
    assert reply.output_text == "Hello."


def test_sampling_parameters_of_chats_reach_the_engine(tooled):
    tooled.answer("One. Two.")
    fields = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}

    reply = ask(tooled, extra_body={**fields, "repetition_penalty": 1.5, "stop": [" Two"]})

    sampling = tooled.engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.repetition_penalty == 1.5
    assert reply.output_text == "One."


def test_an_empty_id_of_a_previous_response_names_none(tooled):
    tooled.answer("Hello.")
    empty = {"role": "assistant", "content": None}
    body = {"model": MODEL, "previous_response_id": "", "input": [*ITEMS, empty, *ITEMS]}

    assert tooled.http.post(PATH, json=body).status_code == 200


def test_items_become_messages(tooled):
    tooled.answer("Sunny.")
    history = [
        {"role": "developer", "content": "Be polite."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "A moment.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather",
         "arguments": "{\"city\": \"Rom\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "warm"}]},
    ]  # fmt: skip

    ask(tooled, input=history, instructions="Be brief.", tools=[WEATHER])

    prompt = prompt_of(tooled)
    assert "<|im_start|>system\nBe brief.\n\nBe polite.<|im_end|>" in prompt
    assert "<|im_start|>user\nRome?<|im_end|>" in prompt
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
    assert f"<|im_start|>assistant\nA moment.{call}<|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nwarm<|im_end|>" in prompt
    assert '"description": "The weather of a city"' in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_by_namespace_and_name(tooled, stream):
    tooled.answer('<tool_call>\n{"name": "crm__find", "arguments": {}}\n</tool_call>')
    find = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    namespace = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [find]}
    tools = [namespace, CLOCK]

    if stream:
        _, reply = events_of(tooled, tools=tools)
    else:
        reply = ask(tooled, tools=tools)

    (call,) = reply.output
    assert (call.namespace, call.name) == ("crm", "find")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    ask(tooled, input=[{"role": "user", "content": "x"}, call.to_dict(), result], tools=tools)
    assert '<tool_call>{"name": "crm__find", "arguments": {}}</tool_call>' in prompt_of(tooled)


def test_an_output_is_an_input_of_the_next_request(tooled):
    tooled.answer("<think>\nI look.</think>" + CALLS)
    first = ask(tooled, tools=[WEATHER, CLOCK])
    calls = [item for item in first.output if item.type == "function_call"]

    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls
    ]
    history = [{"role": "user", "content": "Hi"}, *first.output, *results]
    assert ask(tooled, input=history, tools=[WEATHER, CLOCK]).status == "completed"
    assert prompt_of(tooled).count("<|im_start|>tool\n5<|im_end|>") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_tokens_makes_an_incomplete_response(tooled, stream):
    tooled.answer("one two three four five six seven")

    reply = ask(tooled, max_output_tokens=4, stream=stream)
    if stream:
        *_, last = reply
        assert last.type == "response.incomplete"
        reply = last.response

    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete"
    assert reply.usage.output_tokens == 4


def test_one_call_at_most_if_calls_are_not_parallel(tooled):
    tooled.answer(CALLS + " and a lot more" * 20)

    reply = ask(tooled, tools=[WEATHER, CLOCK], parallel_tool_calls=False)

    assert [i.name for i in reply.output if i.type == "function_call"] == ["weather"]
    assert reply.status == "completed"


def test_the_effort_reaches_the_template_and_none_turns_reasoning_off(tooled):
    tooled.answer("x")
    ask(tooled, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert prompt_of(tooled).endswith("<think>\n")

    ask(tooled, reasoning={"effort": "none", "summary": "auto"})
    assert not prompt_of(tooled).endswith("<think>\n")


def test_the_reasoning_is_limited_as_in_a_chat(tooled):
    tooled.answer("x")

    ask(tooled, extra_body={"thinking_token_budget": 7})

    assert tooled.engine.submitted[-1].sampling.structure.max_thought == 7


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_form_of_the_text_becomes_a_grammar(tooled):
    tooled.answer('{"name": "Tom", "age": 3}')

    parsed = tooled.openai.responses.parse(model=MODEL, input="Who?", text_format=Person)

    assert parsed.output_parsed == Person(name="Tom", age=3)
    assert '"age"' in tooled.engine.submitted[-1].sampling.structure.grammar


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_text(tooled, stream):
    tooled.answer("One two.")

    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events, reply = events_of(tooled, **options)
        sent = [row for e in events if e.type == "response.output_text.delta" for row in e.logprobs]
        assert "".join(row.token for row in sent) == "One two."
    else:
        reply = ask(tooled, **options)

    rows = reply.output[0].content[0].logprobs
    assert "".join(row.token for row in rows) == "One two."
    assert {len(row.top_logprobs) for row in rows} == {2}


def test_a_failure_in_mid_stream_is_an_event(tooled):
    tooled.answer("one two three four five six seven")
    tooled.engine.fail_after = (3, "RequestTooLongError")

    *_, last = ask(tooled, stream=True)

    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == (
        "server_error",
        "the step failed",
    )


def test_a_failure_before_the_first_token_is_an_http_error(tooled):
    tooled.engine.fail_after = (0, "RequestTooLongError")

    with pytest.raises(openai.BadRequestError, match="the step failed"):
        ask(tooled, stream=True)


ITEMS = [{"role": "user", "content": "x"}]
WRONG = [
    ({"metadata": {"a": "x" * (16 << 10)}}, "metadata"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools.1.name"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
        "tools.0.tools.0.type",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [CLOCK, CLOCK]}]},
        "tools.0.tools.1.name",
    ),
    ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools.0.tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
    ({"tools": [{"type": "computer_use_preview"}]}, "tools.0.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"stop": ["x"] * 21}, "stop"),
    ({"min_p": 2}, "min_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ({"text": 5}, "text"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"include": "x"}, "include"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [None]}, "input.0"),
    ({"input": [5]}, "input.0"),
    ({"input": [{}]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ({"input": [{"type": "computer_call"}]}, "input.0"),
    ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
    ({"input": [{"type": "message", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": None}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    ({"input": [*ITEMS, {"type": "function_call", "name": "f"}]}, "input.1.call_id"),
    ({"input": [*ITEMS, {"type": "function_call", "call_id": "c"}]}, "input.1.name"),
    ({"input": [*ITEMS, {"type": "function_call_output", "call_id": "c"}]}, "input.1.output"),
    ({"input": [{"role": "system", "content": "x"}]}, "input"),
    ({"input": ITEMS * 5000}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_requests_are_refused(tooled, fields, param):
    reply = tooled.http.post(PATH, json={"model": MODEL, "input": "x", **fields})

    error = assert_error(reply, 400)
    assert error["param"] == param
    assert not tooled.engine.submitted


def test_fields_that_need_a_stored_response_are_refused_with_the_remedy(tooled):
    items = [{"type": "item_reference", "id": "msg_1"}]

    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        ask(tooled, input=items)
    with pytest.raises(openai.BadRequestError, match="send all items of the conversation"):
        ask(tooled, previous_response_id="resp_1")


def test_an_unknown_model_is_a_404(tooled):
    error = assert_error(tooled.http.post(PATH, json={"model": "other", "input": "x"}), 404)
    assert error["param"] == "model"


HEAD = b'{"model":"tiny-qwen3","input":['
HOSTILE = {
    "nothing": filled(HEAD, b"{}", b"]}"),
    "items": filled(HEAD, b'{"role":"user","content":"x"}', b"]}"),
    "unknown items": filled(HEAD, b'{"type":"x"}', b"]}"),
    "parts": filled(
        HEAD + b'{"role":"user","content":[', b'{"type":"input_text","text":""}', b"]}]}"
    ),
    "deep": HEAD + b'{"role":"user","content":' + b"[" * 10**5 + b"]" * 10**5 + b"}]}",
    "deep schema": b'{"model":"tiny-qwen3","input":"x","text":{"format":{"type":"json_schema",'
    b'"schema":' + b'{"items":' * 5000 + b"{}" + b"}" * 5000 + b"}}}",
    "tools": filled(b'{"model":"tiny-qwen3","input":"x","tools":[', b"{}", b"]}"),
    "surrogate": HEAD + b'{"role":"user","content":"\\ud800"}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused(tooled, name):
    assert_error(tooled.http.post(PATH, content=HOSTILE[name]))
    assert not tooled.engine.submitted


def test_tools_that_a_provider_runs_are_left_out_and_named(tooled):
    tooled.answer("Hello.")
    body = {"model": MODEL, "input": "Hi", "tools": [CLOCK, {"type": "web_search"}]}

    reply = tooled.http.post("/v1/responses", json=body)

    assert reply.json()["status"] == "completed"
    assert reply.headers["x-ignored-parameters"] == "tools[1]"


def test_a_strict_service_refuses_tools_that_a_provider_runs():
    with serving(**{"serve.strict": True}) as service:
        body = {"model": MODEL, "input": "Hi", "tools": [{"type": "web_search"}]}
        error = assert_error(service.http.post("/v1/responses", json=body), 400)

    assert error["param"] == "tools.0.type"


def test_counted_tokens_are_those_of_the_prompt(tooled):
    tooled.answer("x")
    options = {"input": "Hi", "instructions": "Be brief.", "tools": [WEATHER]}

    counted = tooled.openai.responses.input_tokens.count(model=MODEL, **options)

    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == ask(tooled, **options).usage.input_tokens > 20
    counted = tooled.openai.responses.input_tokens.count(model=MODEL, input="hello " * 5000)
    assert counted.input_tokens > tooled.state.context_len
