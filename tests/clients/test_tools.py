"""Libraries for agents, and the openai client, get tool calls and structured answers."""

from __future__ import annotations

from tests.clients.conftest import run_python

SHARED = """
import json, os
from pydantic import BaseModel
API, MODEL = os.environ["API"], "tiny-agent"
ASK, WEATHER = "Give me a person as JSON: Ida, 40 years old.", "What is the weather in Tokyo?"
class Person(BaseModel):
    name: str
    age: int
"""
LANGCHAIN = (
    SHARED
    + """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
@tool
def get_weather(city: str) -> str:
    "The weather of a city"
    return "sunny"
chat = ChatOpenAI(model=MODEL, base_url=API, api_key="none", temperature=0)
tooled = chat.bind_tools([get_weather])
first, *rest = tooled.stream(WEATHER)
streamed = sum(rest, start=first)
def form(method):
    return chat.with_structured_output(Person, method=method).invoke(ASK).model_dump()
print(json.dumps({
    "calls": [(c["name"], c["args"]) for c in tooled.invoke(WEATHER).tool_calls],
    "streamed": [(c["name"], c["args"]) for c in streamed.tool_calls],
    "schema": form("json_schema"),
    "mode": form("json_mode"),
    "function": sorted(form("function_calling")),
}))
"""
)
LITELLM = (
    SHARED
    + """
import litellm
shared = dict(model="openai/" + MODEL, api_base=API, api_key="none", temperature=0)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    return litellm.completion(messages=messages, **shared, **more).choices[0].message
call = ask(WEATHER, tools=tools).tool_calls[0].function
person = ask(ASK, response_format=Person).content
print(json.dumps({"call": [call.name, call.arguments], "person": json.loads(person)}))
"""
)
OPENAI = (
    SHARED
    + """
import openai
client = openai.OpenAI(base_url=API, api_key="none", max_retries=0)
messages = [{"role": "user", "content": ASK}]
chat = client.chat.completions.parse(
    model=MODEL, temperature=0, messages=messages, response_format=Person)
answer = client.responses.parse(model=MODEL, temperature=0, input=ASK, text_format=Person)
print(json.dumps([chat.choices[0].message.parsed.model_dump(), answer.output_parsed.model_dump()]))
"""
)
ROUND = (
    SHARED
    + """
import openai
client = openai.OpenAI(base_url=API, api_key="none", max_retries=0)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
messages = [{"role": "user", "content": WEATHER}]
common = dict(model=MODEL, temperature=0, tools=tools)
first = client.chat.completions.create(messages=messages, **common).choices[0]
calls = first.message.tool_calls
result = dict(role="tool", tool_call_id=calls[0].id, content="sunny, 21 degrees")
messages += [first.message, result]
last = client.chat.completions.create(messages=messages, **common).choices[0]
print(json.dumps({
    "reasons": [first.finish_reason, last.finish_reason],
    "calls": [(c.function.name, json.loads(c.function.arguments)) for c in calls],
    "text": last.message.content,
}))
"""
)
INSTRUCTOR = (
    SHARED
    + """
import instructor, openai
def ask(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=API, api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=MODEL, temperature=0, max_retries=0, response_model=Person,
        messages=[{"role": "user", "content": ASK}])
schema = ask(instructor.Mode.JSON_SCHEMA).model_dump()
tool = sorted(ask(instructor.Mode.TOOLS).model_dump())
print(json.dumps([schema, tool]))
"""
)
PYDANTIC_AI = (
    SHARED
    + """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=API, api_key="none"))
settings = {"temperature": 0}
form = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
tooled = Agent(model, model_settings=settings)
calls = []
@tooled.tool_plain
def get_weather(city: str) -> str:
    "The weather of a city"
    calls.append(city)
    return "sunny, 21 degrees"
text = tooled.run_sync(WEATHER).output
print(json.dumps({"person": form.run_sync(ASK).output.model_dump(), "calls": calls, "text": text}))
"""
)
SMOLAGENTS = (
    SHARED
    + """
from smolagents import OpenAIServerModel, Tool
class Weather(Tool):
    name, description = "get_weather", "The weather of a city"
    inputs, output_type = {"city": {"type": "string", "description": "a city"}}, "string"
    def forward(self, city: str) -> str:
        return "sunny"
model = OpenAIServerModel(MODEL, api_base=API, api_key="none", temperature=0)
message = [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}]
[call] = model.generate(message, tools_to_call_from=[Weather()]).tool_calls
print(json.dumps([call.function.name, call.function.arguments]))
"""
)
IDA = {"name": "Ida", "age": 40}


def test_langchain_binds_tools_and_gets_objects(agent):
    found = run_python("langchain_openai", LANGCHAIN, API=agent.api)

    assert found["calls"] == found["streamed"] == [["get_weather", {"city": "Tokyo"}]]
    assert found["schema"] == found["mode"] == IDA
    # Only the keys are compared, because the model was not trained for this tool.
    assert found["function"] == ["age", "name"]


def test_litellm_passes_tools_and_schemas(agent):
    found = run_python("litellm", LITELLM, API=agent.api)

    assert found == {"call": ["get_weather", '{"city": "Tokyo"}'], "person": IDA}


def test_openai_parses(agent):
    assert run_python("openai", OPENAI, API=agent.api) == [IDA, IDA]


def test_openai_sends_the_result_of_a_call(agent):
    assert run_python("openai", ROUND, API=agent.api) == {
        "reasons": ["tool_calls", "stop"],
        "calls": [["get_weather", {"city": "Tokyo"}]],
        "text": "It is sunny in Tokyo, 21 degrees.",
    }


def test_instructor_gets_objects_by_schema_and_by_tool(agent):
    # Only the keys of the call are compared, because the model was not trained for instructor's
    # tool.
    assert run_python("instructor", INSTRUCTOR, API=agent.api) == [IDA, ["age", "name"]]


def test_an_agent_of_pydantic_ai_calls_its_tool_and_gets_objects(agent):
    found = run_python("pydantic_ai", PYDANTIC_AI, API=agent.api)

    assert found["calls"] == ["Tokyo"] and "Tokyo" in found["text"]
    assert found["person"] == IDA


def test_a_model_of_smolagents_calls_a_tool(agent):
    assert run_python("smolagents", SMOLAGENTS, API=agent.api) == [
        "get_weather",
        '{"city": "Tokyo"}',
    ]
