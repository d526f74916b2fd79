"""The SDK of Anthropic works with the service."""

from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

CODE = f"""
import json, os, anthropic
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
asked = dict(model="tiny-qwen3", messages=[dict(role="user", content={COUNT!r})])
greedy = dict(**asked, max_tokens=50, extra_body=dict(temperature=0))  # create() has no temperature
whole = client.messages.create(**greedy)
with client.messages.stream(**greedy) as stream:
    streamed = "".join(stream.text_stream)
counted = client.messages.count_tokens(**asked)
try:
    client.messages.create(**asked, max_tokens=0)
except anthropic.BadRequestError as e:
    wrong = e.body["error"]["type"]
print(json.dumps(dict(
    texts=[whole.content[0].text, streamed], reason=whole.stop_reason, wrong=wrong,
    counts=[counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
)))
"""
TOOLED = """
import json, os, anthropic
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
schema = dict(type="object", properties=dict(city=dict(type="string")), required=["city"])
common = dict(model="tiny-agent", max_tokens=200, extra_body=dict(temperature=0),
              tools=[dict(name="get_weather", input_schema=schema)])
messages = [dict(role="user", content="What is the weather in Tokyo?")]
first = client.messages.create(messages=messages, **common)
with client.messages.stream(messages=messages, **common) as stream:
    streamed = stream.get_final_message()
use = first.content[-1]
result = dict(type="tool_result", tool_use_id=use.id, content="sunny, 21 degrees")
messages += [dict(role="assistant", content=first.content), dict(role="user", content=[result])]
last = client.messages.create(messages=messages, **common)
thinking = client.messages.create(
    messages=messages, thinking=dict(type="enabled", budget_tokens=1024), **common)
print(json.dumps(dict(
    calls=[(each.content[-1].name, each.content[-1].input) for each in (first, streamed)],
    reasons=[first.stop_reason, streamed.stop_reason, last.stop_reason],
    texts=[each.content[-1].text for each in (last, thinking)],
)))
"""
RUNNER = """
import json, os, anthropic
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
calls, replies = [], []
@anthropic.beta_tool
def get_weather(city: str) -> str:
    "The weather in a city"
    calls.append(city)
    return "sunny, 21 degrees"
runner = client.beta.messages.tool_runner(
    model="tiny-agent", max_tokens=200, tools=[get_weather], extra_body=dict(temperature=0),
    messages=[dict(role="user", content="What is the weather in Tokyo?")])
for reply in runner:
    replies.append(reply)
sizes = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in replies]
print(json.dumps(dict(calls=calls, text=replies[-1].content[-1].text, sizes=sizes)))
"""


def test_a_tool_runner_sends_the_conversation_with_each_request(agent):
    found = run_python("anthropic", RUNNER, URL=agent.url)

    assert found["calls"] == ["Tokyo"]
    assert found["text"].startswith("It is sunny in Tokyo")
    first, second = found["sizes"]
    assert second > first


def test_tools_and_their_results(agent):
    found = run_python("anthropic", TOOLED, URL=agent.url)

    assert found["calls"] == [["get_weather", {"city": "Tokyo"}]] * 2
    assert found["reasons"] == ["tool_use", "tool_use", "end_turn"]
    assert found["texts"] == ["It is sunny in Tokyo, 21 degrees."] * 2


def test_messages_whole_and_streamed(service):
    found = run_python("anthropic", CODE, URL=service.url)

    assert found["texts"] == [COUNTED] * 2
    assert (found["reason"], found["wrong"]) == ("end_turn", "invalid_request_error")
    assert found["counts"][0] == found["counts"][1]
