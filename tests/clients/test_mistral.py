"""Mistral's client gets chat answers, tool calls, structured objects and embeddings."""

from __future__ import annotations

from tests.clients.conftest import run_python

SHARED = """
import json, os
from pydantic import BaseModel
from mistralai.client import Mistral
client = Mistral(api_key="none", server_url=os.environ["URL"])
class Person(BaseModel):
    name: str
    age: int
def user(text):
    return {"role": "user", "content": text}
"""
CHAT = (
    SHARED
    + """
common = dict(model="tiny-agent", temperature=0)
ask = user("Give me a person as JSON: Ida, 40 years old.")
weather = user("What is the weather in Tokyo?")
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
first = client.chat.complete(messages=[weather], tools=tools, **common).choices[0]
call = first.message.tool_calls[0]
result = dict(role="tool", tool_call_id=call.id, name="get_weather", content="sunny, 21 degrees")
history = [weather, first.message, result]
last = client.chat.complete(messages=history, tools=tools, **common).choices[0]
events = client.chat.stream(messages=[weather], tools=tools, **common)
streamed = [call.function for event in events
            for call in event.data.choices[0].delta.tool_calls or []]
whole = client.chat.complete(messages=[ask], **common).choices[0].message.content
pieces = [event.data.choices[0].delta.content or "" for event in client.chat.stream(
    messages=[ask], **common)]
begun = [ask, {"role": "assistant", "content": os.environ["BEGUN"], "prefix": True}]
print(json.dumps({
    "models": [[each.id, each.capabilities.completion_chat] for each in client.models.list().data],
    "call": [call.function.name, json.loads(call.function.arguments)],
    "streamed": [[each.name, json.loads(each.arguments)] for each in streamed],
    "text": last.message.content,
    "texts": [whole, "".join(pieces)],
    "rest": client.chat.complete(messages=begun, **common).choices[0].message.content,
    "parsed": client.chat.parse(response_format=Person, messages=[ask], **common)
        .choices[0].message.parsed.model_dump(),
}))
"""
)
EMBEDDINGS = (
    SHARED
    + """
found = client.embeddings.create(model="tiny-qwen3", inputs=["Once upon a time", "1 2 3"])
print(json.dumps([len(each.embedding) for each in found.data]))
"""
)


def test_mistral_chats_calls_a_tool_and_gets_objects(agent):
    begun = '{"name": "Ida'
    found = run_python("mistralai.client", CHAT, URL=agent.url, BEGUN=begun)

    assert found["models"] == [["tiny-agent", True]]
    assert found["call"] == ["get_weather", {"city": "Tokyo"}]
    assert found["streamed"] == [found["call"]]
    assert found["text"] == "It is sunny in Tokyo, 21 degrees."
    whole, streamed = found["texts"]
    assert whole == streamed == begun + found["rest"]
    assert found["parsed"] == {"name": "Ida", "age": 40}


def test_mistral_embeds(embedder):
    assert run_python("mistralai.client", EMBEDDINGS, URL=embedder.url) == [128, 128]
