"""Every malformed request gets an error 4xx in OpenAI's form, and does not reach the engine."""

from __future__ import annotations

import json

import openai
import pytest

from dist_aclgraph import errors
from dist_aclgraph.serve.openai.errors import status_of

MODEL = "tiny-qwen3"
HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

BAD_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"model": "tiny-qwen3", "messages": [], "temperature": Infinity}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"[" * 200000,
    b'{"model": ' + b"9" * 5000 + b"}",
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "tiny-qwen3", "messages": [{"role": "user", "content": "\\udfff\\ud800"}]}',
]
BAD_CHAT = [
    {"model": 1},
    {"model": None},
    {"messages": []},
    {"messages": "Hi"},
    {"messages": [1]},
    {"messages": [{"role": "r" * 65, "content": "x"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": HI * 2000},
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": 1e999},
    {"top_p": 0},
    {"top_p": 2},
    {"top_k": -2},
    {"top_k": 10**30},
    {"min_p": 2},
    {"seed": 2**70},
    {"seed": 1.5},
    {"n": 0},
    {"n": 10**9},
    {"n": True},
    {"n": "1.5"},
    {"seed": "high"},
    {"temperature": "nan"},
    {"temperature": True},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_tokens": 10**12},
    {"max_completion_tokens": "many"},
    {"stop": ""},
    {"stop": ["x"] * 21},
    {"stop": [1]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [2**40]},
    {"stop_token_ids": list(range(1000))},
    {"min_tokens": -1},
    {"logprobs": 5},
    {"top_logprobs": 5},
    {"logprobs": True, "top_logprobs": 10**9},
    {"presence_penalty": 3},
    {"repetition_penalty": 0},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": []},
    {"allowed_token_ids": [99999]},
    {"allowed_token_ids": {}},
    {"prompt_logprobs": 21},
    {"bad_words": [""]},
    {"bad_words": False},
    {"documents": {}},
    {"chat_template_kwargs": ""},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "custom"}]},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_schema"}},
    {"functions": [{"name": "f"}]},
    {"priority": "high"},
    {"max_tokens": -2},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -2},
    {"chat_template": "{{ 1 }}"},
]
BAD_TEXT = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [""]},
    {"prompt": ["a", 1]},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": [[1], "a"]},
    {"prompt": ["a"] * 100},
    {"prompt": None},
    {"prompt": {"a": 1}},
    {"prompt": [5] * 5000},
    {"prompt": "x" * 1_000_000},
    {"logprobs": 21},
    {"logprobs": True},
    {"best_of": 2},
    {"best_of": 3, "n": 2},
    {"suffix": "x"},  # the demo model's tokenizer has no markers for a suffix
    {"max_tokens": 0},
    {"n": 17},
]


def assert_error(reply, status: int = 400) -> dict:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_JSON, ids=lambda b: repr(b[:24]))
def test_a_body_that_is_not_valid_json_is_refused(service, path, body):
    reply = service.http.post(path, content=body)

    assert_error(reply)
    assert service.engine.submitted == []


@pytest.mark.parametrize("change", BAD_CHAT, ids=lambda c: repr(c)[:40])
def test_a_bad_chat_field_is_refused(service, change):
    body = json.dumps({"model": MODEL, "messages": HI, **change})

    reply = service.http.post(CHAT, content=body)

    assert_error(reply)
    assert service.engine.submitted == []


@pytest.mark.parametrize("change", BAD_TEXT, ids=lambda c: repr(c)[:40])
def test_a_bad_completion_field_is_refused(service, change):
    reply = service.http.post(TEXT, json={"model": MODEL, "prompt": "x", **change})

    assert_error(reply)
    assert service.engine.submitted == []


@pytest.mark.parametrize("value", [{}, "", False])
def test_annotations_of_a_message_are_a_list_or_null(service, value):
    message = {"role": "user", "content": "x", "annotations": value}

    reply = service.http.post("/tokenize", json={"messages": [message]})

    assert "annotations" in assert_error(reply)["message"]
    for fine in ([], [{"type": "url_citation"}], None):
        body = {"messages": [{**message, "annotations": fine}]}
        assert service.http.post("/tokenize", json=body).status_code == 200


def test_an_error_names_the_field(service):
    bad = service.http.post(CHAT, json={"model": MODEL, "messages": HI, "top_p": 7})
    missing = service.http.post(CHAT, json={"model": MODEL})

    assert assert_error(bad)["param"] == "top_p"
    assert assert_error(missing)["param"] == "messages"


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ("max_completion_tokens", 0),
        ("max_new_tokens", 0),
        ("n_predict", -2),
        ("max_tokens", 0),
        ("repeat_penalty", 0),
    ],
)
def test_an_error_names_the_field_that_was_sent(service, sent, value):
    reply = service.http.post(CHAT, json={"model": MODEL, "messages": HI, sent: value})

    error = assert_error(reply)
    assert error["param"] == sent
    assert error["message"].startswith(sent)


def test_no_tokens_at_all_are_refused(service):
    assert (
        assert_error(service.http.post("/detokenize", json={"tokens": None}))["param"] == "tokens"
    )
    assert service.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_an_unknown_model_is_not_found(service):
    with pytest.raises(openai.NotFoundError) as e:
        service.openai.chat.completions.create(model="other", messages=HI)

    assert (e.value.code, e.value.param) == ("model_not_found", "model")


def test_too_long_a_prompt_names_the_context_and_both_numbers(service):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as e:
        service.openai.completions.create(model=MODEL, prompt=[5] * 2040, max_tokens=20)

    assert e.value.code == "context_length_exceeded"
    assert "2040 in the prompt, 20 in the completion" in str(e.value)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_too_long_an_input_of_tokenize_names_its_field(service, field):
    text = "x y " * (1 << 18)
    value = text if field == "prompt" else [{"role": "user", "content": text}]

    error = assert_error(service.http.post("/tokenize", json={field: value}))

    assert (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_a_body_above_the_limit_is_refused_with_413(service):
    limit = service.state.config.serve.max_body_bytes

    reply = service.http.post(CHAT, content=b" " * (limit + 1))
    chunked = service.http.post(CHAT, content=(b" " * 65536 for _ in range(limit // 65536 + 1)))

    assert assert_error(reply, 413)["code"] == "request_too_large"
    assert_error(chunked, 413)


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nowhere", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
    ("GET", "/v1/models/other", 404), ("POST", "/v1/moderations", 404),
])  # fmt: skip
def test_the_router_answers_in_the_same_shape(service, method, path, status):
    assert_error(service.http.request(method, path), status)


@pytest.mark.parametrize(("path", "words"), [
    ("/chat/completions", f"did you mean {CHAT}?"),
    ("/v1/v1/chat/completions", f"did you mean {CHAT}?"),
    ("/v1/chat/completions/chat/completions", f"did you mean {CHAT}?"),
    ("/openai/deployments/m/chat/completions", f"did you mean {CHAT}?"),
    ("/models", "did you mean /v1/models?"),
    ("/v1/responses/resp_1", "no response is stored"),
    ("/api/tags", "there is no path /api/tags; /openapi.json lists all paths"),
])  # fmt: skip
def test_an_unknown_path_is_named_with_the_likely_one(service, path, words):
    assert words in assert_error(service.http.get(path), 404)["message"]


def test_the_engine_still_serves_after_all_that(service):
    service.answer("fine")

    reply = service.openai.chat.completions.create(model=MODEL, messages=HI)

    assert reply.choices[0].message.content == "fine"


@pytest.mark.parametrize(("error", "status"), [
    (errors.RequestError("x"), 400),
    (errors.InvalidParameterError("x"), 400),
    (errors.RequestTooLongError("x"), 400),
    (errors.UnknownModelError("x"), 404),
    (errors.QueueFullError("x"), 503),
    (errors.EngineDeadError("x"), 503),
    (errors.EngineUnavailableError("x"), 503),
    (errors.DeviceError("x"), 500),
    (ValueError("secret"), 500),
])  # fmt: skip
def test_each_error_has_one_status(error, status):
    assert status_of(error) == status
