"""The Agents SDK of OpenAI, which uses /v1/responses, works with the service."""

from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

CODE = f"""
import asyncio, json, os, openai
from agents import Agent, ModelSettings, Runner, set_default_openai_client, set_tracing_disabled
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=os.environ["API"], max_retries=0)
set_default_openai_client(client)
agent = Agent(name="counter", model="tiny-qwen3", model_settings=ModelSettings(temperature=0))
async def main():
    first = await Runner.run(agent, {COUNT!r})
    streamed = Runner.run_streamed(agent, {COUNT!r})
    async for event in streamed.stream_events():
        pass
    history = [*first.to_input_list(), dict(role="user", content={COUNT!r})]
    again = await Runner.run(agent, history)
    usage = first.context_wrapper.usage
    return [first.final_output, streamed.final_output, again.final_output], usage.output_tokens
texts, num_tokens = asyncio.run(main())
print(json.dumps(dict(texts=texts, num_tokens=num_tokens)))
"""
TOOLED = """
import asyncio, json, os, openai
from pydantic import BaseModel
from agents import (
    Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled)
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=os.environ["API"], max_retries=0)
set_default_openai_client(client)
calls = []
class Person(BaseModel):
    name: str
    age: int
@function_tool
def get_weather(city: str) -> str:
    "The weather in a city"
    calls.append(city)
    return "sunny, 21 degrees"
common = dict(model="tiny-agent", model_settings=ModelSettings(temperature=0))
async def main():
    tooled = Agent(name="weather", tools=[get_weather], **common)
    text = await Runner.run(tooled, "What is the weather in Tokyo?")
    streamed = Runner.run_streamed(tooled, "What is the weather in Rome?")
    async for event in streamed.stream_events():
        pass
    form = Agent(name="person", output_type=Person, **common)
    person = await Runner.run(form, "Give me a person as JSON: Ida, 40 years old.")
    return [text.final_output, streamed.final_output], person.final_output.model_dump()
texts, person = asyncio.run(main())
print(json.dumps(dict(texts=texts, person=person, calls=calls)))
"""


def test_an_agent_calls_its_tool_and_gets_objects(agent):
    found = run_python("agents", TOOLED, API=agent.api)

    assert found["calls"] == ["Tokyo", "Rome"]
    assert found["texts"] == [f"It is sunny in {city}, 21 degrees." for city in ("Tokyo", "Rome")]
    assert found["person"] == {"name": "Ida", "age": 40}


def test_an_agent_answers_whole_streamed_and_again(service):
    found = run_python("agents", CODE, API=service.api)

    assert found["texts"][:2] == [COUNTED] * 2
    assert found["texts"][2]
    assert found["num_tokens"] >= len(COUNTED.split())
