"""Stream a chat from a running service: ``python examples/chat.py [URL]`` (pip install openai)."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

if __name__ == "__main__":
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    (model, *_) = client.models.list()
    stream = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "Count from 3 to 9."}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")
