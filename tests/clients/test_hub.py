"""The client of huggingface_hub gets chat answers, tool calls, and answers that follow a schema."""

from __future__ import annotations

import json

from tests.clients.conftest import run_python

CODE = """
import json, os
from huggingface_hub import InferenceClient
client = InferenceClient(base_url=os.environ["API"], api_key="none")
def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat_completion(messages, model="tiny-agent", temperature=0, **more)
schema = {"type": "object", "properties": {"years": {"type": "integer"}}, "required": ["years"],
          "additionalProperties": False}
form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather", "parameters": parameters}}]
person = "Give me a person as JSON: Ida, 40 years old."
chunks = list(ask(person, stream=True, stream_options={"include_usage": True}))
call = ask("What is the weather in Tokyo?", tools=tools).choices[0].message.tool_calls[0].function
print(json.dumps({
    "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "num_tokens": chunks[-1].usage.completion_tokens,
    "formed": json.loads(ask(person, response_format=form).choices[0].message.content),
    "call": [call.name, json.loads(call.arguments)],
}))
"""


def test_the_client_of_the_hub_calls_a_tool_and_gets_objects(agent):
    found = run_python("huggingface_hub", CODE, API=agent.api, HF_HUB_OFFLINE="0")

    assert json.loads(found["text"]) == {"name": "Ida", "age": 40}
    assert found["num_tokens"] > 3
    assert list(found["formed"]) == ["years"]  # without the schema, the model writes other keys
    assert found["call"] == ["get_weather", {"city": "Tokyo"}]
