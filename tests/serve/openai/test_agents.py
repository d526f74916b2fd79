"""A service with a fake engine answers the requests of two coding agents.

``bodies/`` has one request of each agent. Each request has the fields that the agent sends; the
texts were written for this test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_aclgraph.arrays.ints import unpack_ints

BODIES = Path(__file__).parents[1] / "bodies"
RESULTS = {
    "codex": ["README.md\nmain.py", "nothing to commit"],
    "claude_code": ["README.md\nmain.py", '1\tprint("hello")'],
}
PATHS = {"codex": "/v1/responses", "claude_code": "/v1/messages?beta=true"}
CALLED = {"codex": "exec_command", "claude_code": "Bash"}
LAST = {"codex": "response.completed", "claude_code": "message_stop"}


def ask(service, agent: str) -> list[dict]:
    """Send the request of ``agent``; return the events of the response."""
    body = (BODIES / f"{agent}.json").read_bytes()
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "OpenAI-Beta": "y"}
    reply = service.http.post(PATHS[agent], content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "x-ignored-parameters" not in reply.headers
    events = []
    for frame in reply.text.split("\n\n"):
        lines = [line for line in frame.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("agent", PATHS)
def test_an_agent_gets_the_call_of_a_tool(tooled, agent):
    call = {"name": CALLED[agent], "arguments": {"cmd": "cat README.md"}}
    tooled.answer(f"I read it.</think>Now.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
    if agent == "codex":  # this agent does not ask for reasoning
        tooled.answer(f"Now.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")

    events = ask(tooled, agent)

    assert events[-1]["type"] == LAST[agent]
    if agent == "codex":
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == ["message", "function_call"]
        assert json.loads(done[1]["arguments"]) == call["arguments"]
        assert done == events[-1]["response"]["output"]
    else:
        begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
        pieces = [
            e["delta"].get("partial_json", "") for e in events if "index" in e and "delta" in e
        ]
        assert json.loads("".join(pieces)) == call["arguments"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("agent", PATHS)
def test_the_prompt_has_instructions_tools_calls_and_results(tooled, agent):
    tooled.answer("x")

    ask(tooled, agent)

    ids = unpack_ints(tooled.engine.submitted[-1].prompt).tolist()
    prompt = tooled.state.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.count("Use the tools to look before you answer.") == 1
    assert "billing" not in prompt
    assert prompt.count("<tool_call>") == 3  # two calls, and an example in the instructions
    for text in (*RESULTS[agent], "What is in this folder?", "I list the files."):
        assert prompt.count(text) == 1, text
    assert prompt.count("<|im_start|>assistant") == 2
    assert prompt.count("<|im_start|>tool") == 2
