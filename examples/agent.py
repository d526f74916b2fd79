"""Answer a question by a tool of this script: ``python examples/agent.py [URL] [QUESTION]``.

The service runs ``configs/tiny-agent.yaml``, or another model with tools (pip install openai).
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the weather in Tokyo?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def get_weather(city: str) -> dict[str, object]:
    print(f"get_weather({city!r})")
    return {"weather": "sunny", "celsius": 21}


if __name__ == "__main__":
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    (model, *_) = client.models.list()
    messages = [{"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(
            model=model.id, messages=messages, tools=TOOLS, temperature=0
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = json.dumps(get_weather(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)
