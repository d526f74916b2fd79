"""Requests to /v1/messages that need a stored conversation or a summary are refused."""

from __future__ import annotations

import json

import pytest

from tests.serve.openai.test_messages import CLOCK, HI, PATH, client_of, prompt_of
from tests.serve.tooled import MODEL

CREATE = {"type": "create"}
CONTINUE = {"type": "continue", "previous_message_id": "msg_1"}
CALL = f"<tool_call>\n{json.dumps({'name': 'clock', 'arguments': {}})}\n</tool_call>"


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("thread", [CREATE, CONTINUE])
def test_a_thread_is_refused_with_the_code_that_lets_clients_send_the_conversation(
    tooled, path, thread
):
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, "thread": thread}

    reply = tooled.http.post(path, json=body)

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and "thread" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert not tooled.engine.submitted


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_sends_the_question_with_the_results_of_its_tools(tooled, stream):
    import anthropic

    @anthropic.beta_tool
    def clock() -> str:
        """The time of day."""
        tooled.answer("Noon.")
        return "12:00"

    tooled.answer(CALL)
    runner = client_of(tooled).beta.messages.tool_runner(
        model=MODEL, max_tokens=50, messages=HI, tools=[clock], stream=stream
    )

    reply = runner.until_done()

    assert reply.content[0].text == "Noon."
    prompt = prompt_of(tooled)
    for text in ("The time of day.", "<|im_start|>user\nHi", '"clock"', "12:00"):
        assert text in prompt


def test_a_request_for_a_summary_is_refused(tooled):
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, "compaction": {"type": "auto"}}

    error = tooled.http.post(PATH, json=body).json()["error"]

    assert error["type"] == "invalid_request_error" and "compaction" in error["message"]
    body.pop("max_tokens")
    assert tooled.http.post(f"{PATH}/count_tokens", json=body).status_code == 200


def test_absent_threads_and_summaries_are_accepted(tooled):
    tooled.answer("Hello.")
    nothing = dict.fromkeys(("thread", "compaction"))

    body = {"model": MODEL, "messages": HI, "max_tokens": 50, "tools": [CLOCK], **nothing}

    assert tooled.http.post(PATH, json=body).status_code == 200
