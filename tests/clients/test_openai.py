"""The SDK of OpenAI works with the service."""

from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

BEGIN = f"""
import asyncio, json, os, openai
COUNT = {COUNT!r}
HI = [dict(role="user", content=COUNT)]
client = openai.OpenAI(base_url=os.environ["API"], max_retries=0)
chat, text = client.chat.completions, client.completions
common = dict(model="tiny-qwen3", temperature=0)
"""
CHAT = """
whole = chat.create(**common, messages=HI, n=2, seed=1, logprobs=True, top_logprobs=20,
                    max_completion_tokens=30, stop=["zzz"], user="u", metadata={"a": "b"})
chunks = list(chat.create(**common, messages=HI, stream=True,
                          stream_options={"include_usage": True}))
history = [*HI, whole.choices[0].message.model_dump(), *HI]
again = chat.create(**common, messages=history)
extra = chat.with_raw_response.create(**common, messages=HI, extra_body={
    "plugins": [], "repetition_penalty": 1.0, "chat_template_kwargs": {"enable_thinking": False}})
helper = chat.stream(**common, messages=HI)
with helper as events:
    helped = events.get_final_completion().choices[0].message.content
print(json.dumps({
    "texts": [c.message.content for c in whole.choices],
    "tokens": "".join(t.token for t in whole.choices[0].logprobs.content),
    "num_top": len(whole.choices[0].logprobs.content[0].top_logprobs),
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "usage": [chunks[-1].usage.completion_tokens * 2, whole.usage.completion_tokens],
    "again": again.choices[0].message.content,
    "extra": extra.parse().choices[0].message.content,
    "ignored": extra.headers["x-ignored-parameters"],
    "helped": helped,
}))
"""
TEXT = """
prompts = ["Once", "1 2 3"]
both = text.create(**common, prompt=prompts, max_tokens=4, logprobs=2, echo=True)
alone = [text.create(**common, prompt=p, max_tokens=4).choices[0].text for p in prompts]
parts = list(text.create(**common, prompt=prompts, max_tokens=4, stream=True))
streamed = ["".join(p.choices[0].text for p in parts if p.choices[0].index == i) for i in (0, 1)]
wrong = {}
for name, changes in {"model": {"model": "other"}, "max_tokens": {"max_tokens": -2}}.items():
    try:
        text.create(**{**common, "prompt": "x", **changes})
    except openai.APIStatusError as e:
        wrong[name] = [type(e).__name__, e.param]
print(json.dumps({
    "echoed": [c.text for c in both.choices], "alone": alone, "streamed": streamed,
    "firsts": [c.logprobs.token_logprobs[0] for c in both.choices],
    "wrong": wrong,
    "models": [m.id for m in client.models.list()],
}))
"""
TOKENS = """
ids = json.loads(os.environ["IDS"])
common |= dict(max_tokens=4)
made = text.create(**common, prompt=ids, logit_bias={str(ids[-1]): 100}, extra_body={
    "return_token_ids": True})
several = text.create(**common, prompt=[ids, ids[:1]])
alone = [text.create(**common, prompt=p).choices[0].text for p in (ids, ids[:1])]
print(json.dumps({
    "biased": made.choices[0].token_ids, "prompt": made.choices[0].prompt_token_ids,
    "several": [c.text for c in several.choices], "alone": alone,
}))
"""
CANCELS = """
import time
def running():
    lines = httpx.get(os.environ["METRICS"]).text.splitlines()
    found = [line for line in lines if line.startswith("dist_aclgraph_num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)
import httpx
endless = dict(model="tiny-qwen3", prompt="1", max_tokens=1900, stream=True,
               extra_body={"ignore_eos": True})
async def main():
    async with openai.AsyncOpenAI(base_url=os.environ["API"], max_retries=0) as client:
        async def begin():
            stream = await client.completions.create(**endless)
            async for chunk in stream:
                if leaves:
                    return await stream.close()
        leaves = True
        await asyncio.gather(*(begin() for _ in range(8)))
        leaves = False
        tasks = [asyncio.create_task(begin()) for _ in range(8)]
        while not running():  # until the requests have begun
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
asyncio.run(main())
for _ in range(6000):
    if not running():
        break
    time.sleep(0.05)
print(json.dumps(running()))
"""
STREAMS = """
async def one(client, i):
    messages = [dict(role="user", content=f"Count from {i % 5} to {i % 5 + 4}.")]
    stream = await client.chat.completions.create(**common, messages=messages, stream=True)
    return i % 5, "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
async def main():
    async with openai.AsyncOpenAI(base_url=os.environ["API"], max_retries=0) as client:
        return await asyncio.gather(*(one(client, i) for i in range(256)))
print(json.dumps(asyncio.run(main())))
"""


def test_chats(service):
    found = run_python("openai", BEGIN + CHAT, API=service.api)

    for name in ("tokens", "streamed", "extra", "helped"):
        assert found[name] == COUNTED
    assert found["texts"] == [COUNTED] * 2
    assert found["again"]
    assert found["num_top"] == 20
    assert found["usage"][0] == found["usage"][1]
    assert found["ignored"] == "plugins"


def test_completions(service):
    found = run_python("openai", BEGIN + TEXT, API=service.api)

    assert found["echoed"] == [
        a + b for a, b in zip(["Once", "1 2 3"], found["alone"], strict=True)
    ]
    assert found["streamed"] == found["alone"]
    assert found["firsts"] == [None, None]
    assert found["wrong"] == {
        "model": ["NotFoundError", "model"],
        "max_tokens": ["BadRequestError", "max_tokens"],
    }
    assert found["models"] == ["tiny-qwen3"]


def test_token_ids_and_a_bias(service):
    found = run_python("openai", BEGIN + TOKENS, API=service.api, IDS="[70, 71, 72]")

    assert found["prompt"] == [70, 71, 72]
    assert found["biased"] == [72] * 4
    assert found["several"] == found["alone"]


def test_cancelled_requests_do_not_run_on(service):
    code = BEGIN + CANCELS
    assert run_python("openai", code, API=service.api, METRICS=f"{service.url}/metrics") == 0


def test_256_streams_at_once(service):
    found = run_python("openai", BEGIN + STREAMS, API=service.api)

    assert len(found) == 256
    for first in range(5):
        (text,) = {text for begins, text in found if begins == first}
        if first:
            assert text == " ".join(str(first + i) for i in range(5))
