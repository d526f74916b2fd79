from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

CODE = f"""
import json, os
from langchain_openai import ChatOpenAI, OpenAI
chat = ChatOpenAI(model="tiny-qwen3", base_url=os.environ["API"], api_key="none", temperature=0)
first = chat.invoke({COUNT!r})
history = [("user", {COUNT!r}), first, ("user", {COUNT!r})]
rows = chat.bind(logprobs=True).invoke({COUNT!r}).response_metadata["logprobs"]["content"]
llm = OpenAI(model="tiny-qwen3", base_url=os.environ["API"], api_key="none", max_tokens=4)
print(json.dumps({{
    "invoked": first.content,
    "streamed": "".join(part.content for part in chat.stream({COUNT!r})),
    "batch": [reply.content for reply in chat.batch([{COUNT!r}] * 32)],
    "history": chat.invoke(history).content,
    "num_rows": len(rows),
    "text": llm.invoke("1 2 3"),
}}))
"""


def test_chats_and_completions(service):
    found = run_python("langchain_openai", CODE, API=service.api)

    assert found["invoked"] == found["streamed"] == COUNTED
    assert found["batch"] == [COUNTED] * 32
    assert found["history"]
    assert found["num_rows"] >= len(COUNTED.split())
    assert isinstance(found["text"], str)
