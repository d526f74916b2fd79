"""Chats with tools and reasoning, with the openai client and a fake engine."""

from __future__ import annotations

import json

import openai
import pytest
from msgspec import Raw

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.serve.openai.tools import read_tools
from tests.serve.openai.test_errors import assert_error
from tests.serve.tooled import MODEL

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def ask(service, **options):
    options.setdefault("messages", HI)
    return service.openai.chat.completions.create(model=MODEL, **options)


def joined(chunks) -> dict:
    """Join the deltas of a stream into one message, as clients do."""
    message: dict = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(message["calls"]):
                    message["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.id is None
                    assert call.function.name is None
                message["calls"][call.index][2] += call.function.arguments or ""
            message["reason"] = choice.finish_reason
    return message


def test_calls_of_tools_are_parts_of_the_message(tooled):
    tooled.answer(CALLS)

    reply = ask(tooled, tools=[WEATHER, CLOCK])

    message = reply.choices[0].message
    assert message.content == "I look."
    found = [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls]
    assert found == [("function", "weather", '{"city": "Rom"}'), ("function", "clock", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_stream_has_the_same_calls_in_pieces(tooled):
    tooled.answer(CALLS)

    chunks = list(ask(tooled, tools=[WEATHER, CLOCK], stream=True))
    message = joined(chunks)

    assert message["content"] == "I look."
    assert [call[1:] for call in message["calls"]] == [
        ["weather", '{"city": "Rom"}'],
        ["clock", "{}"],
    ]
    assert message["reason"] == "tool_calls"
    sent = [call for c in chunks for call in (c.choices[0].delta.tool_calls or [])]
    assert len(sent) > 4  # arguments arrive in several pieces
    assert all("content" not in c.choices[0].delta.model_fields_set for c in chunks[5:])


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_a_stream_for_mistrals_client_has_whole_calls(tooled, max_tokens):
    tooled.answer(CALLS)
    agent = {"User-Agent": "mistral-client-python/3.7.0"}
    options = {"tools": [WEATHER, CLOCK], "max_tokens": max_tokens}

    chunks = list(ask(tooled, stream=True, extra_headers=agent, **options))
    tooled.answer(CALLS)
    expected = joined(ask(tooled, stream=True, **options))

    found = joined(chunks)
    assert [call[1:] for call in found["calls"]] == [call[1:] for call in expected["calls"]]
    assert (found["content"], found["reason"]) == (expected["content"], expected["reason"])
    sent = [call for chunk in chunks for call in (chunk.choices[0].delta.tool_calls or [])]
    assert [call.function.name for call in sent] == [call[1] for call in found["calls"]]


def test_the_template_gets_the_tools_and_earlier_calls(tooled):
    tooled.answer("Sunny.")
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rom"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]

    assert ask(tooled, messages=history, tools=[WEATHER]).choices[0].message.content == "Sunny."

    prompt = tooled.state.tokenizer.decode(
        unpack_ints(tooled.engine.submitted[-1].prompt).tolist(), skip_special_tokens=False
    )
    assert '"description": "The weather of a city"' in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_tokenize_takes_tools_and_fields_of_templates_as_a_chat_does(tooled):
    tooled.answer("x")
    fields = {"model": MODEL, "messages": HI, "tools": [WEATHER], "enable_thinking": True}

    made = tooled.http.post("/tokenize", json=fields).json()
    assert tooled.http.post("/v1/chat/completions", json=fields).status_code == 200

    prompt = unpack_ints(tooled.engine.submitted[-1].prompt).tolist()
    assert made["tokens"] == prompt
    assert tooled.state.tokenizer.decode(prompt, skip_special_tokens=False).endswith("<think>\n")


# A part of Mistral's messages.
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "assistant", "refusal": "No"}, {"role": "assistant", "content": "No"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No"}]},
        ),
        (
            {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
        ),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"role": "assistant", "content": "a"},
        ),
        ({"role": "assistant", "content": []}, {"role": "assistant", "content": ""}),
        ({"role": "tool", "content": []}, {"role": "tool", "content": ""}),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        ({"role": "tool", "tool_call_id": "1"}, {"role": "tool", "content": ""}),
        (
            {"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": None, "function": {"name": "clock"}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock"}}]},
        ),
        (
            {"role": "assistant", "function_call": {"name": "clock", "arguments": "{}"}},
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock"}}]},
        ),
        ({"role": "function", "name": "clock", "content": "9"}, {"role": "tool", "content": "9"}),
        (
            {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
            {"role": "assistant", "content": "", "reasoning": "hm"},
        ),
        (
            {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "hm"}, "a"]},
            {"role": "assistant", "content": "a", "reasoning": "hm"},
        ),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, "a"]},
            {"role": "assistant", "content": "a"},
        ),
    ],
    ids=repr,
)
def test_messages_may_have_the_forms_of_other_servers(tooled, message, plain):
    found = [
        tooled.http.post("/tokenize", json={"messages": [*HI, each]}).json()
        for each in (message, plain)
    ]

    assert found[0]["tokens"] == found[1]["tokens"]


@pytest.mark.parametrize("name", ["天气", "मौसम", "วันนี้", "citta\u0300"])
def test_a_tool_may_have_a_name_in_any_script(tooled, name):
    tooled.answer(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')

    reply = ask(tooled, tools=[{"type": "function", "function": {"name": name}}])

    assert [c.function.name for c in reply.choices[0].message.tool_calls] == [name]


def test_a_tool_without_a_type_is_a_function(tooled):
    tooled.answer(CALLS)

    reply = ask(tooled, tools=[{"function": CLOCK["function"]}])

    assert [c.function.name for c in reply.choices[0].message.tool_calls] == ["weather", "clock"]


@pytest.mark.parametrize("kind", [{}, {"type": None}])
def test_the_template_gets_the_type_of_a_tool_without_a_type(kind):
    (found, _), (full, _) = (
        read_tools(Raw(json.dumps([tool]).encode()), Raw(), is_parallel=None, is_strict=False)
        for tool in ({"function": CLOCK["function"], **kind}, CLOCK)
    )

    assert list(found.definitions[0].items()) == list(full.definitions[0].items())


@pytest.mark.parametrize(
    "choice",
    [
        *({"type": mode} for mode in ("required", "any")),
        *({"type": kind, "name": "clock"} for kind in ("function", "tool")),
        {"function": {"name": "clock"}},
    ],
    ids=repr,
)
def test_a_choice_may_have_the_form_of_another_api(tooled, choice):
    tooled.answer('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')

    reply = ask(tooled, tools=[WEATHER, CLOCK], tool_choice=choice)

    assert [c.function.name for c in reply.choices[0].message.tool_calls] == ["clock"]
    structure = tooled.engine.submitted[-1].sampling.structure
    assert ("weather" in structure.grammar) == (choice.get("type") in ("required", "any"))


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_a_mode_may_be_an_object(tooled, mode):
    tooled.answer(CALLS)

    message = ask(tooled, tools=[WEATHER, CLOCK], tool_choice={"type": mode}).choices[0].message

    assert bool(message.tool_calls) == (mode == "auto")


def test_tools_that_a_provider_runs_are_left_out_and_named(tooled):
    tooled.answer(CALLS)
    body = {"model": MODEL, "messages": HI, "tools": [{"type": "web_search"}, WEATHER, CLOCK]}

    reply = tooled.http.post("/v1/chat/completions", json=body)
    prompt = unpack_ints(tooled.engine.submitted[-1].prompt).tolist()
    counted = tooled.http.post("/tokenize", json={**body, "tools": [WEATHER, CLOCK]}).json()

    assert reply.headers["X-Ignored-Parameters"] == "tools[0]"
    assert prompt == counted["tokens"]
    assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_calls_stay_text(tooled, choice):
    tooled.answer(CALLS)
    options = {} if choice is None else {"tools": [WEATHER], "tool_choice": choice}

    message = ask(tooled, **options).choices[0].message

    assert message.content == CALLS
    assert message.tool_calls is None


def test_one_call_at_most_if_calls_are_not_parallel(tooled):
    tooled.answer(CALLS + " and a lot more" * 20)

    reply = ask(tooled, tools=[WEATHER, CLOCK], parallel_tool_calls=False)

    assert [c.function.name for c in reply.choices[0].message.tool_calls] == ["weather"]
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_call_that_the_limit_of_tokens_cuts_off_says_length(tooled):
    tooled.answer(CALLS)

    reply = ask(tooled, tools=[WEATHER, CLOCK], max_tokens=20)

    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_opened", [False, True])
def test_reasoning_is_apart_from_the_content(tooled, stream, is_opened):
    tooled.answer("hm, 2\n</think>\n\nFour." if is_opened else "<think>\nhm, 2\n</think>\n\nFour.")

    reply = ask(tooled, stream=stream, extra_body={"enable_thinking": is_opened})

    if stream:
        message = joined(reply)
        assert (message["reasoning"], message["content"]) == ("hm, 2", "Four.")
        assert message["reason"] == "stop"
    else:
        message = reply.choices[0].message
        assert (message.reasoning_content, message.content) == ("hm, 2", "Four.")
        assert message.reasoning == "hm, 2"
        assert reply.usage.completion_tokens_details.reasoning_tokens > 3


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_call_within_reasoning_is_a_call_unless_tools_are_strict(tooled, is_strict):
    # The grammar of a strict tool applies only to the text after the reasoning, so a call within
    # the reasoning is text.
    call = CALLS[CALLS.index("<tool_call>") :]
    tooled.answer(f"hm\n{call}</think>Yes" if is_strict else f"hm\n{call}")
    weather = {**WEATHER, "function": {**WEATHER["function"], "strict": is_strict}}

    reply = ask(tooled, tools=[weather, CLOCK], extra_body={"enable_thinking": True})

    message = reply.choices[0].message
    names = [each.function.name for each in message.tool_calls or []]
    assert names == ([] if is_strict else ["weather", "clock"])
    assert message.reasoning_content == (f"hm\n{call}" if is_strict else "hm")
    assert (message.content or "") == ("Yes" if is_strict else "")


def test_stop_strings_end_only_content(tooled):
    tooled.answer("<think>one STOP</think>two STOP three")

    reply = ask(tooled, stop=["STOP"])

    assert reply.choices[0].message.reasoning_content == "one STOP"
    assert reply.choices[0].message.content == "two "


def test_several_choices_have_their_own_calls(tooled):
    tooled.answer(CALLS)

    reply = ask(tooled, tools=[WEATHER, CLOCK], n=2)

    ids = {call.id for choice in reply.choices for call in choice.message.tool_calls}
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "refusal": "No"}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
            "messages.0.content.0.refusal",
        ),
        ({"tools": [{"type": ""}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"function": {"name": "\u0300"}}]}, "tools.0.function.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages.0.content.0.text",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name"),
        ({"tools": [CLOCK] * 513}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"messages": [{"role": "user", "function_call": {"name": "x"}}]}, "messages.0.function"),
        ({"messages": [{"role": "user", "content": [THOUGHT]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
    ],
)
def test_wrong_tools_are_refused(tooled, fields, param):
    reply = tooled.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HI, **fields}
    )

    error = assert_error(reply, 400)
    assert error["param"].startswith(param)


def test_a_model_whose_calls_are_unknown_refuses_tools(service):
    with pytest.raises(openai.BadRequestError, match=r"serve\.tool_format"):
        ask(service, tools=[CLOCK])
