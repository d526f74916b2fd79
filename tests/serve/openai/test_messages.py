"""POST /v1/messages, with the anthropic client and a fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pydantic
import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.serve.anthropic.messages import usage_of
from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.api_keys import ApiKey, ApiKeys
from dist_aclgraph.serve.openai.generation import Usage
from tests.serve.conftest import WAIT_S, serving, until
from tests.serve.http.test_hostile_bodies import filled
from tests.serve.openai.test_tools import CALLS
from tests.serve.tooled import MODEL

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
KEY = "0123456789abcdef-key"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
THOUGHT = "<think>\nhm, 2\n</think>\n\nFour."


def client_of(service, key: str = "none") -> anthropic.Anthropic:
    import anthropic  # takes seconds, so only these tests import it

    return anthropic.Anthropic(base_url=service.url, api_key=key, max_retries=0, timeout=WAIT_S)


def ask(service, **options):
    options = {"messages": HI, "max_tokens": 200, **options}
    return client_of(service).messages.create(model=MODEL, **options)


def prompt_of(service) -> str:
    return service.state.tokenizer.decode(
        unpack_ints(service.engine.submitted[-1].prompt).tolist(), skip_special_tokens=False
    )


def without_ids(message) -> dict:
    found = message.to_dict()
    for part in (found, *found["content"]):
        for name in ("id", "signature", "parsed_output"):
            part.pop(name, None)
    found.pop("stop_details", None)
    return found


@pytest.mark.parametrize(
    ("answer", "types", "reason"),
    [
        ("Hello there.", ["text"], "end_turn"),
        (THOUGHT, ["thinking", "text"], "end_turn"),
        (CALLS, ["text", "tool_use", "tool_use"], "tool_use"),
        ("<think>\nI look.</think>" + CALLS[8:], ["thinking", "tool_use", "tool_use"], "tool_use"),
        ("", [], "end_turn"),
    ],
)
def test_a_stream_says_the_same_as_a_whole_message(tooled, answer, types, reason):
    tooled.answer(answer)
    options = {"messages": HI, "max_tokens": 200, "tools": [WEATHER, CLOCK]}

    whole = ask(tooled, **options)
    with client_of(tooled).messages.stream(model=MODEL, **options) as stream:
        streamed = stream.get_final_message()

    assert [block.type for block in whole.content] == types
    assert whole.stop_reason == reason
    assert without_ids(streamed) == without_ids(whole)


def test_the_parts_of_an_answer(tooled):
    tooled.answer("<think>\nI look.</think>" + CALLS)

    reply = ask(tooled, tools=[WEATHER, CLOCK])

    thought, text, weather, clock = reply.content
    assert (thought.thinking, text.text) == ("I look.", "I look.")
    assert thought.signature
    assert (weather.name, weather.input) == ("weather", {"city": "Rom"})
    assert (clock.name, clock.input) == ("clock", {})
    assert weather.id != clock.id
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert reply.usage.output_tokens_details.thinking_tokens > 1


def test_the_events_of_each_block_come_in_order(tooled):
    tooled.answer(THOUGHT + CALLS[8:])

    kinds: list[str] = []
    for event in ask(tooled, tools=[WEATHER, CLOCK], stream=True):
        kind = event.type
        if kind == "content_block_delta":
            kind = event.delta.type
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)

    def block(*deltas: str) -> list[str]:
        return ["content_block_start", *deltas, "content_block_stop"]

    assert kinds == [
        "message_start",
        *block("thinking_delta", "signature_delta"),
        *block("text_delta"),
        *block("input_json_delta"),
        *block("input_json_delta"),
        "message_delta",
        "message_stop",
    ]


def test_blocks_become_messages(tooled):
    tooled.answer("Sunny.")
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "A moment.", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rom"}},
            {"type": "tool_use", "id": "c2", "name": "clock", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
            {"type": "text", "text": "Well?"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [
                {"type": "text", "text": "no clock"}]}]},
    ]  # fmt: skip
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=fa690;"}
    system = [billing, {"type": "text", "text": "Be brief."}]

    ask(tooled, messages=history, system=system, tools=[WEATHER, CLOCK])

    prompt = prompt_of(tooled)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "billing" not in prompt
    assert "<|im_start|>user\nRome?<|im_end|>" in prompt
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
    assert f"<|im_start|>assistant\nA moment.{call}<tool_call>" in prompt
    results = "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nError:\nno clock<|im_end|>\n"
    assert f"{results}<|im_start|>user\nWell?<|im_end|>" in prompt


def test_documents_and_search_results_of_text_are_text(tooled):
    tooled.answer("Sunny.")
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    document = {"type": "document", "title": "Rome", "context": "a guide", "citations": {}}
    plain = {"type": "text", "media_type": "text/plain", "data": "It is old."}
    found = {"type": "search_result", "source": "https://rome.it", "title": "Rom", "content": parts}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1"}
    history = [
        {"role": "user", "content": [{**document, "source": plain}, found]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{**result, "content": [
            {"type": "tool_reference", "tool_name": "clock"},
            {"type": "document", "source": {"type": "content", "content": parts}}, found]}]},
    ]  # fmt: skip

    ask(tooled, messages=history, tools=[WEATHER, CLOCK])

    prompt, shown = prompt_of(tooled), "Rom\nhttps://rome.it\nOne.\nTwo."
    assert f"user\nRome\na guide\nIt is old.\n{shown}<|im_end|>" in prompt
    assert f"tool\nclock\nOne.\nTwo.\n{shown}<|im_end|>" in prompt


def test_only_the_first_message_is_a_system_message(tooled):
    tooled.answer("x")
    history = [
        {"role": "system", "content": "Be polite."},
        *HI,
        {"role": "system", "content": [{"type": "text", "text": "It is late."}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "Go on."},
    ]

    ask(tooled, messages=history, system="Be brief.")

    assert prompt_of(tooled).startswith(
        "<|im_start|>system\nBe brief.\nBe polite.<|im_end|>\n"
        "<|im_start|>user\nHi\nIt is late.<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n"
    )


def test_an_answer_is_a_message_of_the_next_request(tooled):
    tooled.answer("<think>\nI look.</think>" + CALLS)
    first = ask(tooled, tools=[WEATHER, CLOCK])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
        for block in first.content
        if block.type == "tool_use"
    ]

    history = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    assert ask(tooled, messages=history, tools=[WEATHER, CLOCK]).stop_reason == "tool_use"
    assert prompt_of(tooled).count("<|im_start|>tool\n5<|im_end|>") == 2


def test_an_answer_continues_the_assistants_last_message(tooled):
    tooled.answer("and so on")

    ask(tooled, messages=[*HI, {"role": "assistant", "content": "Hello"}])

    assert prompt_of(tooled).endswith("<|im_start|>assistant\nHello")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [
        ({"max_tokens": 4}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "three"]}, "stop_sequence", "three"),
    ],
)
def test_why_an_answer_has_ended(tooled, fields, reason, stop, stream):
    tooled.answer("one two three four five six seven")

    reply = ask(tooled, stream=stream, **fields)
    if stream:
        events = list(reply)
        assert events[0].message.stop_reason is None
        reply = events[-2].delta

    assert (reply.stop_reason, reply.stop_sequence) == (reason, stop)


def test_a_limit_may_exceed_the_room_in_the_context(tooled):
    tooled.engine.reply = lambda submit: [70] * submit.max_tokens
    client = client_of(tooled)

    def asked(count: int) -> dict:
        return {"model": MODEL, "messages": [{"role": "user", "content": "hello " * count}]}

    used = [client.messages.count_tokens(**asked(count)).input_tokens for count in (100, 200)]
    count = 100 + (tooled.state.context_len - 10 - used[0]) * 100 // (used[1] - used[0])
    reply = client.messages.create(**asked(count), max_tokens=32_000)

    assert reply.stop_reason == "model_context_window_exceeded"
    assert reply.usage.input_tokens + reply.usage.output_tokens == tooled.state.context_len


def test_one_call_at_most_if_calls_are_not_parallel(tooled):
    tooled.answer(CALLS + " and a lot more" * 20)

    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = ask(tooled, tools=[WEATHER, CLOCK], tool_choice=choice)

    assert [b.name for b in reply.content if b.type == "tool_use"] == ["weather"]


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_required_call_is_a_grammar(tooled, kind):
    tooled.answer(CALLS[8:])
    choice = {"type": "tool", "name": "weather"} if kind == "tool" else {"type": kind}

    reply = ask(tooled, tools=[WEATHER, CLOCK], tool_choice=choice)

    assert tooled.engine.submitted[-1].sampling.structure.grammar
    assert len(reply.content) == (1 if kind == "tool" else 2)
    assert reply.stop_reason == "tool_use"


def test_without_a_choice_of_tools_calls_stay_text(tooled):
    tooled.answer(CALLS)

    reply = ask(tooled, tools=[WEATHER], tool_choice={"type": "none"})

    assert [block.type for block in reply.content] == ["text"]


def test_thinking_is_turned_on_with_a_budget(tooled):
    tooled.answer("hm</think>x")

    ask(tooled, thinking={"type": "enabled", "budget_tokens": 1024})

    assert prompt_of(tooled).endswith("<think>\n")
    assert tooled.engine.submitted[-1].sampling.structure.max_thought == 1024


class Person(pydantic.BaseModel):
    name: str


def test_a_form_of_the_text_becomes_a_grammar(tooled):
    tooled.answer('{"name": "Tom"}')

    reply = client_of(tooled).messages.parse(
        model=MODEL, max_tokens=50, messages=HI, output_format=Person
    )

    assert reply.parsed_output == Person(name="Tom")
    assert '"name"' in tooled.engine.submitted[-1].sampling.structure.grammar


def test_the_form_may_have_its_older_name(tooled):
    tooled.answer('{"name": "Tom"}')
    form = {"type": "json_schema", "schema": Person.model_json_schema()}

    ask(tooled, extra_body={"output_format": form})

    assert '"name"' in tooled.engine.submitted[-1].sampling.structure.grammar


@pytest.mark.parametrize("is_older", [False, True])
def test_an_error_of_the_form_names_the_field_that_was_sent(tooled, is_older):
    form = {"type": "json_schema", "schema": {"type": "string", "pattern": "(?=a)b"}}
    fields = {"output_format": form} if is_older else {"output_config": {"format": form}}
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, **fields}

    error = assert_error(tooled.http.post(PATH, json=body))

    param = "output_format" if is_older else "output_config.format"
    assert error["message"].startswith(param)


def test_an_empty_system_prompt_is_left_out(tooled):
    tooled.answer("x")

    ask(tooled, system="")

    assert "system" not in prompt_of(tooled)


def test_arguments_that_are_no_object_are_not_lost(tooled):
    tooled.answer('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro')

    reply = ask(tooled, tools=[WEATHER])

    (call,) = reply.content
    assert call.input == {"arguments": '{"city": "Ro'}


def test_counted_tokens_are_those_of_the_prompt(tooled):
    tooled.answer("x")
    options = {"messages": HI, "system": "Be brief.", "tools": [WEATHER]}

    counted = client_of(tooled).messages.count_tokens(model=MODEL, **options)

    assert counted.input_tokens == ask(tooled, **options).usage.input_tokens > 20
    long = [{"role": "user", "content": "hello " * 5000}]
    counted = client_of(tooled).messages.count_tokens(model=MODEL, messages=long)
    assert counted.input_tokens > tooled.state.context_len


def test_cached_tokens_are_counted_apart():
    usage = usage_of(Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4))

    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)
    assert usage["output_tokens"] == 5


def test_a_failure_in_mid_stream_is_an_event(tooled):
    tooled.answer("one two three four five six seven")
    tooled.engine.fail_after = (3, "EngineError")

    import anthropic

    with pytest.raises(anthropic.APIStatusError) as failed:
        list(ask(tooled, stream=True))

    assert failed.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the step failed"},
    }


def assert_error(reply, status: int = 400) -> dict:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def block_of(role: str, block: object) -> dict:
    return {"messages": [{"role": role, "content": [block]}]}


WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [{}]}, "messages.0"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": HI * 2000}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    (block_of("user", {"type": "image", "source": {}}), "messages.0.content.0"),
    (block_of("user", {"type": "text"}), "messages.0.content.0.text"),
    (block_of("user", {"type": "document"}), "messages.0.content.0.source"),
    (
        block_of("user", {"type": "document", "source": {"type": "base64", "data": "x"}}),
        "messages.0.content.0.source",
    ),
    (
        block_of("user", {"type": "document", "source": {"type": "text"}}),
        "messages.0.content.0.source.data",
    ),
    (block_of("user", {"type": "search_result", "content": 5}), "messages.0.content.0"),
    (block_of("assistant", {"type": "document"}), "messages.0.content.0"),
    (block_of("user", {"type": "tool_reference", "tool_name": "f"}), "messages.0.content.0"),
    (block_of("user", {"type": "tool_use", "name": "f", "input": {}}), "messages.0.content.0"),
    (block_of("user", {"type": "tool_result"}), "messages.0.content.0.tool_use_id"),
    (
        block_of("user", {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "x"}]}),
        "messages.0.content.0.content.0",
    ),
    (block_of("assistant", {"type": "tool_use", "input": {}}), "messages.0.content.0.name"),
    (block_of("assistant", {"type": "tool_use", "name": "f", "input": 5}), "messages.0.content.0"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools.0.type"),
    ({"tools": [{"name": "a b"}]}, "tools.0.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools.1.name"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"stop_sequences": ["a"] * 21}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_requests_are_refused(tooled, fields, param):
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, **fields}

    error = assert_error(tooled.http.post(PATH, json=body))

    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert not tooled.engine.submitted


HEAD = b'{"model":"tiny-qwen3","max_tokens":5,"messages":['
BLOCKS = HEAD + b'{"role":"user","content":['
HOSTILE = {
    "nothing": filled(HEAD, b"{}", b"]}"),
    "messages": filled(HEAD, b'{"role":"user","content":"x"}', b"]}"),
    "no blocks": filled(BLOCKS, b"{}", b"]}]}"),
    "blocks": filled(BLOCKS, b'{"type":"text","text":""}', b"]}]}"),
    "results": filled(
        BLOCKS + b'{"type":"tool_result","tool_use_id":"c","content":[',
        b'{"type":"text","text":""}',
        b"]}]}]}",
    ),
    "deep": HEAD + b'{"role":"user","content":' + b"[" * 10**5 + b"]" * 10**5 + b"}]}",
    "deep input": HEAD
    + b'{"role":"assistant","content":[{"type":"tool_use","name":"f","input":'
    + b'{"a":' * 5000
    + b"{}"
    + b"}" * 5000
    + b"}]}]}",
    "system": filled(
        b'{"model":"tiny-qwen3","max_tokens":5,"messages":[{"role":"user","content":"x"}],'
        b'"system":[',
        b'{"type":"text","text":""}',
        b"]}",
    ),
}


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused(tooled, path, name):
    assert_error(tooled.http.post(path, content=HOSTILE[name]))
    assert not tooled.engine.submitted


def test_errors_of_all_layers_have_anthropics_form(tooled):
    assert_error(tooled.http.post(PATH, content=b"{"), 400)
    assert_error(tooled.http.get(PATH), 405)
    assert_error(tooled.http.post(f"{PATH}/batches", json={}), 404)
    headers = {"Content-Type": "text/plain"}
    assert_error(tooled.http.post(PATH, content=b"x", headers=headers), 415)
    other = {"model": "other", "messages": HI, "max_tokens": 5}
    assert assert_error(tooled.http.post(PATH, json=other), 404)["type"] == "not_found_error"
    total = tooled.state.slots.total
    until(lambda: tooled.state.slots.taken == 0)  # the service releases slots after the answer
    tooled.state.slots.acquire(total)
    for path in (PATH, f"{PATH}?beta=true"):  # only the second path reaches the app
        full = tooled.http.post(path, json=other)
        assert assert_error(full, 503)["type"] == "overloaded_error"
        assert full.headers["retry-after"]
    tooled.state.slots.release(total)


def test_a_key_may_come_as_x_api_key():
    import anthropic

    access = Access(ApiKeys(fixed=(ApiKey.of(KEY),)))
    with serving(access) as guarded:
        guarded.answer("Hello.")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(guarded)
        assert refused.value.body["error"]["type"] == "authentication_error"

        client = client_of(guarded, KEY)
        reply = client.messages.create(model=MODEL, max_tokens=20, messages=HI)
        assert reply.content[0].text == "Hello."


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_tools_that_a_provider_runs_are_left_out_and_named(tooled, path):
    hosted = [{"type": f"web_{each}_20250305", "name": each} for each in ("search", "fetch")]
    body = {"model": MODEL, "messages": HI, "tools": [hosted[0], CLOCK, hosted[1]]}
    if path == "/v1/messages":
        tooled.answer("Hello.")
        body["max_tokens"] = 20

    reply = tooled.http.post(path, json=body)

    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-parameters"] == "tools[0], tools[2]"
