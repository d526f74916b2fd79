"""LiteLLM, used as a library, works with the service."""

from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

CODE = f"""
import asyncio, json, os, litellm
litellm.drop_params = False
common = dict(api_base=os.environ["API"], api_key="none", temperature=0,
              messages=[dict(role="user", content={COUNT!r})])
found = {{}}
for provider in ("openai", "hosted_vllm"):
    name = f"{{provider}}/tiny-qwen3"
    whole = litellm.completion(model=name, **common, top_k=5, seed=1)
    parts = litellm.completion(model=name, **common, stream=True)
    streamed = "".join(p.choices[0].delta.content or "" for p in parts)
    later = asyncio.run(litellm.acompletion(model=name, **common))
    found[provider] = [whole.choices[0].message.content, streamed,
                       later.choices[0].message.content]
text = litellm.text_completion(model="text-completion-openai/tiny-qwen3", prompt="1 2 3",
                               api_base=os.environ["API"], api_key="none", max_tokens=4)
found["tokens"] = text.usage.completion_tokens
print(json.dumps(found))
"""


def test_chats_and_completions(service):
    found = run_python("litellm", CODE, API=service.api)

    assert found["openai"] == [COUNTED] * 3
    assert found["hosted_vllm"] == [COUNTED] * 3
    assert 1 <= found["tokens"] <= 4
