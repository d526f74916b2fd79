"""Each hostile body gets an error 4xx, and does not block the event loop for long."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.body import decode
from tests.serve.openai.test_errors import CHAT, MODEL, TEXT, assert_error

LARGEST = 2 << 20
RESPONSES = "/v1/responses"


def filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    """Return a body of nearly the maximum size, with as many copies of ``item`` as fit."""
    room = LARGEST - len(head) - len(tail)
    items = (item + b",") * (room // (len(item) + 1))
    return head + items[:-1] + tail


def text(item: bytes) -> bytes:
    return filled(b'{"model":"tiny-qwen3","prompt":[', item, b"]}")


def field(name: bytes, item: bytes) -> bytes:
    head = b'{"model":"tiny-qwen3","messages":[{"role":"user","content":"x"}],"' + name + b'":['
    return filled(head, item, b"]}")


def chat(item: bytes) -> bytes:
    return filled(b'{"model":"tiny-qwen3","messages":[', item, b"]}")


def items(item: bytes) -> bytes:
    return filled(b'{"model":"tiny-qwen3","input":[', item, b"]}")


BODIES = {
    "objects": (TEXT, text(b"{}")),
    "lists": (TEXT, text(b"[]")),
    "lists of one": (TEXT, text(b"[1]")),
    "ids": (TEXT, text(b"1")),
    "empty texts": (TEXT, text(b'""')),
    "texts": (TEXT, text(rb'"\u1234"')),
    "deep": (TEXT, text(b"[" * 60 + b"]" * 60)),
    "messages without anything": (CHAT, chat(b"{}")),
    "messages": (CHAT, chat(b'{"role":"user","content":"x"}')),
    "messages of no parts": (CHAT, chat(b'{"role":"user","content":[]}')),
    "parts": (
        CHAT,
        filled(
            b'{"model":"tiny-qwen3","messages":[{"role":"user","content":[',
            b'{"type":"text","text":""}',
            b"]}]}",
        ),
    ),
    "unknown fields": (CHAT, filled(b'{"model":"tiny-qwen3",', b'"a":{}', b"}")),
    "items": (RESPONSES, items(b'{"role":"user","content":"x"}')),
    "items without anything": (RESPONSES, items(b"{}")),
    "parts of an item": (
        RESPONSES,
        filled(
            b'{"model":"tiny-qwen3","input":[{"role":"user","content":[',
            b'{"type":"input_text","text":""}',
            b"]}]}",
        ),
    ),
    "stop strings": (CHAT, field(b"stop", b'"a"')),
    "stop ids": (CHAT, field(b"stop_token_ids", b"1")),
    "tools": (CHAT, field(b"tools", b"{}")),
    "modalities": (CHAT, field(b"modalities", b'"text"')),
    "ids to detokenize": ("/detokenize", filled(b'{"tokens":[', b"1", b"]}")),
    "one long text": (TEXT, b'{"model":"tiny-qwen3","prompt":"' + b"a " * 10**6 + b'"}'),
}


@contextlib.contextmanager
def watched(loop: asyncio.AbstractEventLoop):
    """Yield a list. Each turn of the event loop appends the CPU seconds that it has taken."""
    turns: list[float] = []

    async def tick() -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            turns.append(now - before)
            before = now

    ticking = asyncio.run_coroutine_threadsafe(tick(), loop)
    try:
        yield turns
    finally:
        ticking.cancel()


def scan_s(body: bytes) -> float:
    """Return the CPU seconds that a scan of a body takes. The scan builds no objects."""
    found = []
    for _ in range(5):
        before = time.process_time()
        msgspec.json.decode(body, type=msgspec.Raw)
        found.append(time.process_time() - before)
    return min(found)


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_while_the_event_loop_turns(service, name):
    path, body = BODIES[name]

    longest = []
    for _ in range(3):  # each time includes other threads' CPU time, so the lowest is used
        with watched(service.loop) as turns:
            reply = service.http.post(path, content=body)
        assert_error(reply)
        longest.append(max(turns))

    assert service.engine.submitted == []
    # To decode a body of objects would take 1,500 times as long as to scan it.
    assert min(longest) < 12 * scan_s(BODIES["objects"][1])


def test_the_error_for_an_invalid_prompt_names_its_type(service):
    error = assert_error(service.http.post(TEXT, content=BODIES["objects"][1]))

    assert (error["param"], error["message"]) == ("prompt.0", "prompt.0: expected int, got object")


@pytest.mark.parametrize("name", [b"metadata", b"nonsense"])
def test_ignored_fields_may_have_any_size(service, name):
    service.answer("a")
    body = field(name, b"[]")

    with watched(service.loop) as turns:
        reply = service.http.post(CHAT, content=body)

    assert reply.status_code == 200
    assert max(turns) < 12 * scan_s(body)


def test_a_long_text_is_tokenized_beside_the_event_loop(service):
    prompt = "hello world " * 5_000

    with watched(service.loop) as turns:
        reply = service.http.post("/tokenize", json={"model": MODEL, "prompt": prompt})
        counted = len(turns)

    assert reply.json()["count"] > 10_000
    assert counted > 10


def test_stop_ids_outside_the_vocabulary_are_refused(service):
    size = service.state.tokenizer.vocab_size
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "stop_token_ids": [5, size]}

    error = assert_error(service.http.post(TEXT, json=body))

    assert error["param"] == "stop_token_ids"
    assert f"[0, {size})" in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON: it is empty"),
        (b" \n", "JSON: it is empty"),
        (rb'{"a":"\ud83d"}', r"JSON: \ud83d is an unpaired surrogate"),
        (rb'{"a":"x\uDE00\ud83d\ude00"}', r"JSON: \uDE00 is an unpaired surrogate"),
        (rb'{"\ud83d\ude00":"\uD83Dx"}', r"JSON: \uD83D is an unpaired surrogate"),
        (rb'{"a":"\ud83d\ude00', "JSON: Input data was truncated"),
    ],
)
def test_an_error_says_what_is_wrong_with_the_text(body, words):
    with pytest.raises(InvalidParameterError) as caught:
        decode(body, dict[str, str])

    assert str(caught.value).endswith(words)


def test_an_error_of_a_key_names_its_field():
    with pytest.raises(InvalidParameterError) as caught:
        decode(b'{"x":1}', dict[int, float], "logit_bias")

    assert str(caught.value) == "logit_bias: expected int, got str"
