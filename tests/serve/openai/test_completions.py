from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.sampling import MAX_BIASES
from dist_aclgraph.serve.openai import state
from tests.serve.openai.test_errors import assert_error

MODEL = "tiny-qwen3"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def data_of(stream: str) -> list[str]:
    """Return the data of all frames of a stream, except [DONE]."""
    return [line.removeprefix("data: ") for line in stream.split("\n\n")[:-2]]


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Count from 3 to 9", "<|im_start|>user\n1 <|im_end|> 2"])
def test_an_echoed_prompt_has_log_probabilities(service, prompt, stream):
    tokenizer = service.state.tokenizer
    service.engine.reply = lambda submit: tokenizer.encode(" 4 5<|im_end|>")
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 9}

    reply = service.openai.completions.create(**body, stream=stream)

    parts = list(reply) if stream else [reply]
    text = "".join(part.choices[0].text for part in parts)
    listed = [part.choices[0].logprobs for part in parts]
    tokens = [token for part in listed for token in part.tokens]
    assert text == "".join(tokens) == prompt + " 4 5"
    values = [value for part in listed for value in part.token_logprobs]
    assert values == [None, *(-i for i in range(1, len(tokenizer.encode(prompt)))), *[-0.5] * 3]
    tops = [top for part in listed for top in part.top_logprobs]
    assert tops[0] is None
    assert all(len(top) == 2 for top in tops[1:])
    offsets = [at for part in listed for at in part.text_offset]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_point_at_tokens_of_text_that_is_sent_late(service, stream):
    service.answer("abcde")  # this text is sent late, because a stop string could begin with it
    body = {"model": MODEL, "prompt": "x", "logprobs": 0, "stop": ["abcdX", "cdeX"]}

    reply = service.openai.completions.create(**body, stream=stream)

    choices = [part.choices[0] for part in (reply if stream else [reply])]
    text = "".join(choice.text for choice in choices)
    found = [
        (token, text[at : at + len(token)])
        for choice in choices
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    ]
    assert text == "".join(token for token, _ in found) == "abcde"
    assert all(token == at_offset for token, at_offset in found)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Count from 3 to 9", [5]], ids=["text", "one token"])
def test_log_probabilities_of_a_prompt_are_computed_for_one_choice(own_service, stream, prompt):
    submitted = own_service.engine.submitted
    body = {"model": MODEL, "prompt": [prompt] * 2, "n": 3, "echo": True, "logprobs": 1}
    more = {"max_tokens": 2, "seed": 1, "stream": stream}

    reply = own_service.openai.completions.create(**body, **more)

    found = {i: [] for i in range(6)}
    for part in reply if stream else [reply]:
        for choice in part.choices:
            found[choice.index] += choice.logprobs.token_logprobs
    num_tokens = len(own_service.state.tokenizer.encode(prompt)) if isinstance(prompt, str) else 1
    prompts = [None, *(-i for i in range(1, num_tokens))]
    assert list(found.values()) == [[*prompts, -0.5, -0.5]] * 6
    asked = [each.sampling.prompt_logprobs for each in submitted]
    assert asked == [1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_wait_for_the_log_probabilities_of_their_prompt(own_service, stream):
    own_service.engine.reports_late = True
    body = {"model": MODEL, "prompt": "1 2", "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}

    reply = own_service.openai.completions.create(**body, stream=stream)

    found: dict[int, list[float]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    for part in reply if stream else [reply]:
        for choice in part.choices:
            found[choice.index] += choice.logprobs.token_logprobs
            texts[choice.index] += choice.text
    assert list(found.values()) == [[None, -1, -0.5, -0.5]] * 2
    assert all(text.startswith("1 2") for text in texts.values())


def test_an_echoed_prompt_alone_has_log_probabilities(service):
    body = {"model": MODEL, "prompt": ["1 2 3 4", "5 6 7"], "echo": True, "logprobs": 0}

    reply = service.openai.completions.create(**body, max_tokens=0)

    assert [choice.text for choice in reply.choices] == body["prompt"]
    values = [choice.logprobs.token_logprobs for choice in reply.choices]
    assert values == [[None, -1, -2, -3], [None, -1, -2]]


def test_prompt_logprobs_name_token_ids(service):
    reply = service.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "1 2 3 4", "prompt_logprobs": 1, "max_tokens": 1},
    )

    first, *others = reply.json()["choices"][0]["prompt_logprobs"]
    ids = service.state.tokenizer.encode("1 2 3 4")
    assert first is None
    assert [list(other) for other in others] == [[str(i), "60"] for i in ids[1:]]
    assert others[0][str(ids[1])] == {"logprob": -1, "rank": 9, "decoded_token": " 2"}


def test_too_many_log_probabilities_of_a_prompt_are_refused(service, monkeypatch):
    monkeypatch.setattr(state, "MAX_PROMPT_LOGPROBS", 11)
    body = {"model": MODEL, "prompt": "1 2 3 4", "max_tokens": 1}

    assert service.http.post("/v1/completions", json=body | {"prompt_logprobs": 1}).is_success
    reply = service.http.post("/v1/completions", json=body | {"prompt_logprobs": 2})
    echoed = service.http.post("/v1/completions", json=body | {"echo": True, "logprobs": 2})

    assert assert_error(reply)["param"] == "prompt_logprobs"
    assert assert_error(echoed)["param"] == "logprobs"
    assert echoed.json()["error"]["message"].startswith("logprobs 2 are 12 numbers")


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "n_predict"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_minus_one_is_as_many_tokens_as_the_context_allows(own_service, path, name):
    prompt = {"prompt": [5] * 2000} if path == "completions" else {"messages": HI}
    own_service.state.sampling_defaults = {"max_tokens": 7}
    own_service.engine.reply = lambda submit: [own_service.state.tokenizer.eos_ids[0]]

    reply = own_service.http.post(f"/v1/{path}", json={"model": MODEL, **prompt, name: -1})

    assert reply.is_success
    (submit,) = own_service.engine.submitted
    assert submit.max_tokens + len(unpack_ints(submit.prompt)) == 2048


def test_fields_of_other_servers_with_their_limits_are_accepted(service):
    service.answer("a")
    chat = {"model": MODEL, "messages": HI, "priority": 7, "top_logprobs": 0, "logprobs": False}

    text = service.openai.completions.create(model=MODEL, prompt="x", logprobs=20)

    assert len(text.choices[0].logprobs.top_logprobs[0]) == 20
    assert service.http.post("/v1/chat/completions", json=chat).is_success


@pytest.mark.parametrize(
    ("prompt", "asked", "kept"),
    [
        ([70, 71, 72, 73], 2, [72, 73]),
        ([70, 71], 5, [70, 71]),
        (list(range(60, 110)) * 50, -1, (list(range(60, 110)) * 50)[-2038:]),
    ],
)
def test_a_prompt_is_truncated_from_the_left(service, prompt, asked, kept):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 10, "truncate_prompt_tokens": asked}

    reply = service.http.post("/v1/completions", json=body)

    assert reply.status_code == 200, reply.text
    assert unpack_ints(service.engine.submitted[0].prompt).tolist() == kept


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_if_requested(service, stream):
    service.answer("two words")
    ids = service.state.tokenizer.encode("two words")
    extra = {"return_token_ids": True}

    reply = service.openai.completions.create(
        model=MODEL, prompt=[70, 71], extra_body=extra, stream=stream
    )

    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert choices[0].prompt_token_ids == [70, 71]
    assert [i for c in choices for i in c.token_ids] == [*ids, service.state.tokenizer.eos_ids[0]]


def test_other_names_of_fields_have_their_effect(service):
    body = {"model": MODEL, "prompt": "x", "n_predict": 3, "repeat_penalty": 1.5}
    body |= {"priority": 0, "random_seed": 11}

    service.http.post("/v1/completions", json=body)

    (submitted,) = service.engine.submitted
    assert (submitted.max_tokens, submitted.sampling.repetition_penalty) == (3, 1.5)
    assert submitted.sampling.seed == 11


def test_preferred_and_forbidden_tokens_reach_the_engine(service):
    body = {
        "model": MODEL,
        "prompt": "1",
        "logit_bias": {"70": -3, "71": 2.5},
        "allowed_token_ids": [70, 71, 72],
        "bad_words": ["3", "3 4"],
    }

    assert service.http.post("/v1/completions", json=body).is_success

    sampling = service.engine.submitted[-1].sampling
    encode = service.state.tokenizer.encode
    assert unpack_ints(sampling.allowed).tolist() == [70, 71, 72]
    assert sampling.bad_words == (tuple(encode("3 4")), tuple(encode(" 3 4")))
    biases = np.frombuffer(sampling.biases, "<f4").tolist()
    single = {encode("3")[0]: -np.inf, encode(" 3")[0]: -np.inf}
    assert dict(zip(unpack_ints(sampling.biased).tolist(), biases, strict=True)) == {
        70: -3,
        71: 2.5,
        **single,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/completions", {"prompt": "Hi"}), (CHAT, {"messages": HI})]
)
@pytest.mark.parametrize(
    ("stops", "reason"), [({"stop": "w"}, "w"), ({"stop_token_ids": [27]}, 27), ({}, None)]
)
def test_the_stop_reason_is_the_requested_stop(service, path, prompt, stops, reason, stream):
    service.answer("ab two")
    body = {"model": MODEL, "stream": stream, **prompt, **stops}
    if "stop_token_ids" in stops:
        service.engine.reply = lambda submit: [5, 27, 5]

    reply = service.http.post(path, json=body)

    *_, last = [{}, reply.json()] if not stream else map(json.loads, data_of(reply.text))
    (choice,) = last["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_the_number_of_answers_may_be_said_twice(service):
    body = {"model": MODEL, "prompt": "Hi", "n": 2, "best_of": 2}

    assert len(service.http.post("/v1/completions", json=body).json()["choices"]) == 2


@pytest.mark.parametrize("texts", [False, True])
def test_numbers_may_be_texts_or_floats_without_a_fraction(service, texts):
    reply = service.http.post(
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": "Hi",
            "max_tokens": "3" if texts else 3.0,
            "temperature": "0.5" if texts else 0.5,
            "stream": "false" if texts else 0,
            "logit_bias": {"7": "2" if texts else 2.0},
        },
    )

    assert reply.json()["object"] == "text_completion"
    (submit,) = service.engine.submitted
    assert (submit.max_tokens, submit.sampling.temperature) == (3, 0.5)
    assert unpack_ints(submit.sampling.biased).tolist() == [7]
    assert np.frombuffer(submit.sampling.biases, "<f4").tolist() == [2.0]


def test_as_many_biases_may_be_texts_as_numbers(service):
    body = {"model": MODEL, "prompt": "Hi"}

    def post(count: int) -> httpx.Response:
        biases = {str(token_id): "1" for token_id in range(count)}
        return service.http.post("/v1/completions", json={**body, "logit_bias": biases})

    assert post(service.state.tokenizer.vocab_size).status_code == 200
    assert assert_error(post(MAX_BIASES + 1))["param"] == "logit_bias"


def test_a_byte_order_mark_before_the_body_is_ignored(service):
    body = json.dumps({"model": MODEL, "prompt": "Hi"}).encode("utf-8-sig")

    assert service.http.post("/v1/completions", content=body).status_code == 200
