"""Request fields that limit reasoning or turn it off have an effect. If a field cannot have an
effect, the service refuses the request, or names the field in the header ``x-ignored-parameters``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_aclgraph.formats.choice import AnswerFormat
from dist_aclgraph.formats.reasoning import Thought
from dist_aclgraph.serve.openai.conversation import TAIL_TOKENS, _find_thinking
from dist_aclgraph.text.chat_template import ChatOptions
from tests.serve.openai.test_errors import assert_error
from tests.serve.openai.test_tools import HI
from tests.serve.tooled import MODEL

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
THINK = Thought("<think>", "</think>")
BEGIN, END, EOS, BLANK, SPELLED = range(5)
TEXTS = {BEGIN: "<think>", END: "</think>", EOS: "<eos>", BLANK: "\n", SPELLED: "</think>", 5: "hm"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
        (CHAT, {"thinking_budget": 5}, "thinking_budget"),
        (RESPONSES, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
        (RESPONSES, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (MESSAGES, {"output_config": {"effort": "none"}}, "output_config.effort"),
    ],
)
def test_reasoning_that_has_no_limit_and_no_end_is_refused(
    service: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(service.state, "answers", AnswerFormat("gpt_oss", None, {}))

    reply = service.http.post(path, json=body_of(path) | fields)

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith(param)
    assert error.get("param", param) == param


@pytest.mark.parametrize(
    ("fields", "is_on"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "auto"}}, None),
        ({"thinking": True}, True),
        ({"thinking": None}, None),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, False),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_reasoning_is_turned_on_and_off_as_by_other_servers(
    tooled: Any, fields: dict[str, Any], is_on: bool | None
) -> None:
    expected = {} if is_on is None else {"enable_thinking": is_on}
    asked = [
        tooled.http.post("/tokenize", json={"messages": HI, **each}) for each in (fields, expected)
    ]

    assert asked[0].json()["tokens"] == asked[1].json()["tokens"]
    assert "x-ignored-parameters" not in asked[0].headers
    assert_error(tooled.http.post(CHAT, json=body_of(CHAT) | {"thinking": [1]}), 400)


@pytest.mark.parametrize("field", ["thinking_tokens", "thinking_budget"])
def test_a_limit_without_an_end_token_names_the_clients_field(
    tooled: Any, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(tooled.state, "answers", AnswerFormat("hermes", THINK, {}))

    error = assert_error(tooled.http.post(CHAT, json=body_of(CHAT) | {field: 5}), 400)

    assert error["param"] == field


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"thinking_budget": 5}, "thinking_budget"),
        (RESPONSES, {"thinking_tokens": 5}, "thinking_tokens"),
        ("/v1/completions", {"prompt": "x", "thinking_token_budget": 5}, "thinking_token_budget"),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens",
        ),
    ],
)
def test_a_limit_of_reasoning_that_a_model_does_not_have_is_named(
    service: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    service.answer("Hello.")

    reply = service.http.post(path, json=body_of(path) | fields)

    assert reply.is_success, reply.text
    assert reply.headers["x-ignored-parameters"] == param


def test_a_limit_of_reasoning_that_has_an_effect_is_not_named(tooled: Any) -> None:
    tooled.answer("Hello.")

    reply = tooled.http.post(CHAT, json=body_of(CHAT) | {"thinking_tokens": 5})

    assert reply.is_success
    assert "x-ignored-parameters" not in reply.headers


@pytest.mark.parametrize(
    ("prompt", "continues", "is_open"),
    [
        ([5, BEGIN, BLANK], False, True),
        ([BEGIN, BLANK, END, BLANK], False, False),
        ([BEGIN, 5], False, False),
        ([BEGIN, 5], True, True),
        ([BEGIN, *[5] * 2 * TAIL_TOKENS], True, True),
        ([BEGIN, 5, SPELLED, 5], True, True),
        ([BEGIN, 5, END, 5], True, False),
        ([BEGIN, 5, EOS, 5], True, False),
        ([5], True, False),
    ],
)
def test_tokens_of_the_prompt_tell_whether_reasoning_is_open(
    prompt: list[int], continues: bool, is_open: bool
) -> None:
    state: Any = SimpleNamespace(
        answers=AnswerFormat(None, THINK, {"<think>": BEGIN, "</think>": END}),
        tokenizer=SimpleNamespace(
            eos_ids=(EOS,),
            text_of=lambda ids, skip_special_tokens: "".join(TEXTS[each] for each in ids),
        ),
    )

    found = _find_thinking(state, prompt, ChatOptions(continue_final_message=continues))

    assert found is not None
    assert found.is_open is is_open


def body_of(path: str) -> dict[str, Any]:
    body = {"model": MODEL}
    if path == RESPONSES:
        return {**body, "input": "Hi"}
    return {**body, "max_tokens": 5} | ({} if path == "/v1/completions" else {"messages": HI})
