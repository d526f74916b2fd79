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


def test_an_agent_answers_whole_streamed_and_again(service):
    found = run_python("agents", CODE, API=service.api)

    assert found["texts"][:2] == [COUNTED] * 2
    assert found["texts"][2]
    assert found["num_tokens"] >= len(COUNTED.split())
