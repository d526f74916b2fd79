from __future__ import annotations

import pytest

from dist_aclgraph.ints import unpack_ints

MODEL = "tiny-qwen3"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Once", 1), (["Once", "upon"], 2), ([5, 6, 7], 1), ([[5, 6], [7, 8]], 2)],
)
def test_every_form_of_prompt_is_answered(service, prompt, count):
    service.answer(" a time")

    reply = service.openai.completions.create(model=MODEL, prompt=prompt)

    assert [choice.index for choice in reply.choices] == list(range(count))
    assert {choice.text for choice in reply.choices} == {" a time"}


def test_sixteen_tokens_are_the_default(service):
    service.openai.completions.create(model=MODEL, prompt="Once")

    assert service.engine.submitted[0].max_tokens == 16


def test_token_ids_reach_the_engine_as_they_are(service):
    service.openai.completions.create(model=MODEL, prompt=[70, 71, 72], max_tokens=1)

    assert unpack_ints(service.engine.submitted[0].prompt).tolist() == [70, 71, 72]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_brings_the_prompt_first(service, stream):
    service.answer(" a time")

    reply = service.openai.completions.create(
        model=MODEL, prompt="Once upon", echo=True, stream=stream
    )

    text = "".join(c.choices[0].text for c in reply) if stream else reply.choices[0].text
    assert text == "Once upon a time"


def test_echo_alone_counts_the_prompt(service):
    reply = service.openai.completions.create(
        model=MODEL, prompt="Once upon", echo=True, max_tokens=0
    )

    assert reply.choices[0].text == "Once upon"
    assert (reply.usage.completion_tokens, service.engine.submitted) == (0, [])


def test_logprobs_give_tokens_and_their_offsets(service):
    service.answer("Hello there")

    reply = service.openai.completions.create(model=MODEL, prompt="x", logprobs=2)

    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == "Hello there"
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert logprobs.token_logprobs[0] == -0.5
    assert len(logprobs.top_logprobs[0]) == 2


def test_streamed_choices_carry_their_index_and_usage(service):
    service.answer("ab")

    chunks = list(
        service.openai.completions.create(
            model=MODEL, prompt=["x", "y"], stream=True, stream_options={"include_usage": True}
        )
    )

    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "ab", 1: "ab"}
    assert chunks[-1].usage.prompt_tokens == 2
