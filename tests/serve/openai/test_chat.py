from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import msgspec
import openai
import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import Config
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import ChatRequest, TokenizeRequest
from dist_aclgraph.text.chat_template import ChatTemplate, RenderLimits
from tests.serve.conftest import until
from tests.serve.openai.test_errors import assert_error

MODEL = "tiny-qwen3"
HI = [{"role": "user", "content": "Hi"}]


def test_a_chat_answer_has_text_reason_and_usage(service):
    service.answer("Hello! 1 2 3")

    reply = service.openai.chat.completions.create(model=MODEL, messages=HI)

    assert reply.choices[0].message.content == "Hello! 1 2 3"
    assert reply.choices[0].finish_reason == "stop"
    prompt = service.state.tokenizer.encode_chat(HI)
    assert unpack_ints(service.engine.submitted[0].prompt).tolist() == prompt
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_usage(service):
    service.answer("Hello 😀 there")

    chunks = list(
        service.openai.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello 😀 there"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 3
    assert len({c.id for c in chunks}) == 1


def test_a_stream_ends_with_done_and_is_not_cached(service):
    service.answer("a")

    reply = service.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}
    )

    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_frees_the_engine(service, stream):
    ids = service.state.tokenizer.encode("one STOP two") * 50
    service.engine.reply = lambda submit: ids

    reply = service.openai.chat.completions.create(
        model=MODEL, messages=HI, stop=["TOP"], stream=stream
    )
    text = (
        "".join(c.choices[0].delta.content or "" for c in reply)
        if stream
        else reply.choices[0].message.content
    )

    assert text == "one S"
    until(lambda: len(service.engine.aborted) == 1)


def test_max_tokens_ends_with_length(service):
    reply = service.openai.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=3
    )

    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


def test_without_max_tokens_the_rest_of_the_context_is_asked_for(service):
    service.answer("a")

    service.openai.chat.completions.create(model=MODEL, messages=HI)

    submit = service.engine.submitted[0]
    assert submit.max_tokens == 2048 - len(unpack_ints(submit.prompt))


def test_logprobs_name_the_token_and_its_alternatives(service):
    service.answer("Hello there")

    reply = service.openai.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2
    )

    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "Hello there"
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [-0.75, -1.0]
    assert bytes(content[0].bytes).decode() == content[0].token


def test_streamed_logprobs_cover_every_token(service):
    service.answer("Hello there")

    chunks = service.openai.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, stream=True
    )

    tokens = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert "".join(tokens) == "Hello there"


def drawn_seeds(config: Config, state: ApiState, replica: int = 0) -> list[int]:
    """Return seeds that a new ingress draws for requests without a seed."""
    new = ApiState(config, state.tokenizer, state.client, replica=replica)
    return [new.open_journal({}).chance.seed for _ in range(5)]


def test_every_start_of_an_ingress_draws_other_seeds(service):
    state = service.state

    starts = [drawn_seeds(state.config, state) for _ in range(3)]

    assert len({seed for start in starts for seed in start}) == 15


def test_with_a_configured_seed_replicas_draw_others_and_each_start_the_same(service):
    state = service.state
    config = state.config.model_copy(update={"seed": 5})

    starts = [drawn_seeds(config, state, replica) for replica in (0, 1, 2)]

    assert len({seed for start in starts for seed in start}) == 15
    assert starts == [drawn_seeds(config, state, replica) for replica in (0, 1, 2)]


def test_n_choices_have_seeds_of_their_own(service):
    service.answer("a")

    reply = service.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)

    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(s.sampling.seed for s in service.engine.submitted) == [7, 8, 9]
    assert reply.usage.prompt_tokens == len(service.state.tokenizer.encode_chat(HI))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": HI}),
        ("completions", {"prompt": "Hi"}),
        ("responses", {"input": "Hi"}),
    ],
)
def test_the_seed_minus_one_is_a_random_seed(service, path, fields):
    for _ in range(3):
        body = {"model": MODEL, "seed": -1, **fields}
        assert service.http.post(f"/v1/{path}", json=body).status_code == 200

    assert len({-1, *(submit.sampling.seed for submit in service.engine.submitted)}) == 4


@pytest.mark.parametrize("length", [2041, 3000])
@pytest.mark.parametrize(
    ("path", "param"), [("chat/completions", "messages"), ("responses", "input")]
)
def test_a_prompt_that_is_too_long_names_the_field_of_messages(service, path, param, length):
    message = {"role": "user", "content": "a" * length}

    reply = service.http.post(f"/v1/{path}", json={"model": MODEL, param: [message]})

    error = assert_error(reply)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_text_parts_are_joined_and_developer_means_system(service):
    service.answer("a")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]

    service.openai.chat.completions.create(model=MODEL, messages=messages)

    ids = unpack_ints(service.engine.submitted[0].prompt).tolist()
    text = service.state.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert "user\na\nb<|im_end|>" in text


def test_sampling_parameters_reach_the_engine(service):
    service.answer("a")

    service.openai.chat.completions.create(
        model=MODEL, messages=HI, temperature=0.5, top_p=0.9, seed=3, presence_penalty=0.1,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
                    "stop_token_ids": [5]},
    )  # fmt: skip

    submit = service.engine.submitted[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.seed, sampling.min_p, sampling.min_tokens) == (3, 0.1, 1)
    assert set(submit.stop_token_ids) == {*service.state.tokenizer.eos_ids, 5}


def test_a_failure_in_mid_stream_is_one_error_frame_without_done(service):
    service.engine.fail_after = (3, "DeviceError")

    reply = service.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HI, "stream": True, "max_tokens": 9},
    )

    frames = [line for line in reply.text.split("\n\n") if line]
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["message"] == "the step failed"
    assert "[DONE]" not in reply.text


def test_the_sdk_raises_on_a_failed_stream(service):
    service.engine.fail_after = (3, "DeviceError")

    with pytest.raises(openai.APIError, match="the step failed"):
        list(
            service.openai.chat.completions.create(
                model=MODEL, messages=HI, stream=True, max_tokens=9
            )
        )


def test_a_request_that_the_engine_refuses_at_once_is_no_stream(service):
    service.engine.fail_after = (0, "QueueFullError")

    reply = service.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HI, "stream": True}
    )

    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(service, stream):
    service.engine.step_s = 0.02
    service.engine.reply = lambda submit: [70] * submit.max_tokens
    body = {"model": MODEL, "messages": HI, "stream": stream, "max_tokens": 1000}

    if stream:
        with service.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_lines())
    else:
        leaver = HTTPConnection(service.url.removeprefix("http://"))
        headers = {"Content-Type": "application/json"}
        leaver.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        until(lambda: service.engine.num_running == 1)
        leaver.close()

    until(lambda: len(service.engine.aborted) == 1 and service.engine.num_running == 0)


def test_a_bug_in_mid_stream_is_an_error_frame_that_gives_nothing_away(own_service):
    tokenizer = own_service.state.tokenizer
    whole, seen = tokenizer.whole_text, []

    def breaking(token_id):
        seen.append(token_id)
        if len(seen) > 1:
            raise ZeroDivisionError("secret")
        return whole(token_id)

    tokenizer.whole_text = breaking
    own_service.engine.reply = lambda submit: [70] * submit.max_tokens

    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 1000}
    reply = own_service.http.post("/v1/chat/completions", json=body)

    *_, before, last = reply.text.strip().split("\n\n")
    assert json.loads(before.removeprefix("data: "))["choices"][0]["finish_reason"] is None
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "internal server error"
    assert "secret" not in reply.text
    until(lambda: own_service.engine.num_running == 0)


def test_a_client_that_leaves_before_the_first_frame_frees_the_engine(service):
    """The server cancels the response before it has sent the first frame."""
    service.engine.reply = lambda submit: [70] * submit.max_tokens
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 1000}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    sent = []

    async def leave_at_the_second_look() -> None:
        looks = 0

        async def receive():
            nonlocal looks
            if (message := next(messages, None)) is not None:
                return message
            looks += 1
            if looks == 1:
                await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            await asyncio.sleep(3600)

        await make_api(service.state)(scope, receive, send)

    asyncio.run(leave_at_the_second_look())

    assert [message["type"] for message in sent] == ["http.response.start"]
    until(lambda: len(service.engine.aborted) == 1 and service.engine.num_running == 0)
    until(lambda: service.state.slots.taken == 0)


def test_tokens_without_text_bring_frames_of_their_own(service):
    end = service.state.tokenizer.eos_ids[0]
    service.engine.reply = lambda submit: [end] * submit.max_tokens

    reply = service.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HI, "stream": True, "max_tokens": 5, "ignore_eos": True},
    )

    assert reply.text.count("data: {") == 1 + 5


def test_a_template_at_its_limit_is_a_400_and_other_chats_are_answered(own_service):
    service = own_service
    source = (
        "{% for i in range(messages[0].content | int) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}fine"
    )
    limits = RenderLimits(cpu_s=1)
    service.state.tokenizer._template = ChatTemplate({"default": source}, {}, limits)
    with ThreadPoolExecutor(2) as clients:
        endless = [{"role": "user", "content": "99999"}]
        body = {"model": MODEL, "messages": endless, "max_tokens": 1}
        hangs = clients.submit(service.http.post, "/v1/chat/completions", json=body)

        for _ in range(3):
            reply = service.http.post("/tokenize", json={"model": MODEL, "messages": HI})
            assert reply.json()["tokens"] == service.state.tokenizer.encode("fine")
        assert not hangs.done()
        error = assert_error(hangs.result())

    assert error["param"] == "messages"
    assert error["message"].startswith("the chat template takes more than 1 s of processor time;")


def test_template_variables_of_a_request_reach_the_template(own_service):
    source = (
        "{{ enable_thinking }},{{ budget }},{{ (documents or [{}])[0].text }},"
        "{{ reasoning_effort }}"
        "{% for m in messages %}|{{ m.role }}:{{ m.name }}:{{ m.content }}:"
        "{{ m.reasoning_content }}"
        "{% endfor %}{% if add_generation_prompt %}|go{% endif %}"
    )
    own_service.state.tokenizer._template = ChatTemplate({"default": source}, {})
    messages = [
        {"role": "user", "name": "Ann", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": [{"type": "text", "text": "One"}]},
    ]
    own = {"chat_template_kwargs": {"enable_thinking": False, "budget": 3}}
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, **own}
    more = {"documents": [{"text": "d"}], "reasoning_effort": "low"}

    def prompt_of(**fields):
        reply = own_service.http.post("/v1/chat/completions", json=body | fields)
        assert reply.status_code == 200, reply.text
        return own_service.state.tokenizer.decode(
            unpack_ints(own_service.engine.submitted[-1].prompt).tolist()
        )

    chat = "|user:Ann:Hi:|assistant:::hm|assistant::One:"
    assert prompt_of(**more) == "False,3,d,low" + chat + "|go"
    assert prompt_of(add_generation_prompt=False) == "False,3,," + chat
    assert prompt_of(continue_final_message=True) == "False,3,," + chat.removesuffix(":")
    last = {**messages[-1], "prefix": True}  # a field of the APIs of DeepSeek and Mistral
    continued = "False,3,," + chat.removesuffix(":")
    assert prompt_of(messages=[*messages[:-1], last]) == continued
    count = {"model": MODEL, "messages": [*messages[:-1], last], **own}
    counted = own_service.http.post("/tokenize", json=count).json()["tokens"]
    assert own_service.state.tokenizer.decode(counted) == continued
    earlier = [{**message, "prefix": True} for message in messages[:-1]]
    assert prompt_of(messages=[*earlier, messages[-1]], **more) == "False,3,d,low" + chat + "|go"
    for wrong, word in [
        ({"chat_template_kwargs": {"tools": []}}, "tools"),
        ({"chat_template": "rag"}, "which has: default"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "one of them to false"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"documents": ["d"]}, "documents.0"),
    ]:
        reply = own_service.http.post("/v1/chat/completions", json=body | wrong)
        assert reply.status_code == 400
        assert word in reply.json()["error"]["message"]


def test_the_models_sampling_defaults_hold_where_a_request_gives_nothing(own_service):
    own_service.state.sampling_defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    body = {"model": MODEL, "messages": HI}

    def sampled(path="chat/completions", **fields):
        reply = own_service.http.post(f"/v1/{path}", json=body | fields)
        assert reply.status_code == 200, reply.text
        sampling = own_service.engine.submitted[-1].sampling
        return sampling.temperature, sampling.top_k, own_service.engine.submitted[-1].max_tokens

    assert sampled() == (0.6, 20, 7)
    assert sampled(temperature=0, top_k=3, max_tokens=2) == (0, 3, 2)
    del body["messages"]
    assert sampled("completions", prompt="1 2") == (0.6, 20, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_if_requested(service, stream):
    service.answer("two words")
    tokenizer = service.state.tokenizer
    extra = {"return_token_ids": True, "truncate_prompt_tokens": 3}

    reply = service.openai.chat.completions.create(
        model=MODEL, messages=HI, extra_body=extra, stream=stream
    )

    if stream:
        chunks = list(reply)
        prompt = chunks[0].choices[0].prompt_token_ids
        ids = [i for chunk in chunks[1:] for i in chunk.choices[0].token_ids]
    else:
        prompt, ids = reply.prompt_token_ids, reply.choices[0].token_ids
    assert prompt == tokenizer.encode_chat(HI)[-3:]
    assert ids == [*tokenizer.encode("two words"), tokenizer.eos_ids[0]]


def test_log_probabilities_of_a_prompt_are_not_streamed_in_a_chat(own_service):
    body = {"model": MODEL, "messages": HI, "max_tokens": 1, "prompt_logprobs": 0}

    reply = own_service.http.post("/v1/chat/completions", json=body | {"stream": True})
    whole = own_service.http.post("/v1/chat/completions", json=body)

    assert "not streamed" in assert_error(reply)["message"]
    assert len(whole.json()["prompt_logprobs"]) == whole.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_no_effort_turns_reasoning_off(kind):
    body = {"model": MODEL, "messages": HI, "reasoning_effort": "none"}

    asked = msgspec.json.decode(json.dumps(body), type=kind)

    assert asked.chat_options().variables == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("is_on", [True, False])
def test_a_field_turns_reasoning_on_or_off_for_several_models(kind, name, is_on):
    body = {"model": MODEL, "messages": HI, name: is_on}

    asked = msgspec.json.decode(json.dumps(body), type=kind)

    assert asked.chat_options().variables == {"enable_thinking": is_on, "thinking": is_on}


@pytest.mark.parametrize("value", [{}, [], "", 2])
def test_thinking_has_the_form_of_the_document(value):
    body = {"model": MODEL, "messages": HI, "thinking": value}

    asked = msgspec.json.decode(json.dumps(body), type=TokenizeRequest)

    with pytest.raises(InvalidParameterError, match="thinking"):
        asked.chat_options()


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {}}, {}),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            {"reasoning_effort": "high"},
        ),
        (
            {"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"reasoning": None, "thinking": {"type": "adaptive"}}, {}),
    ],
)
def test_reasoning_may_be_controlled_as_in_other_apis(kind, fields, variables):
    body = {"model": MODEL, "messages": HI, **fields}

    asked = msgspec.json.decode(json.dumps(body), type=kind)

    assert asked.chat_options().variables == variables


@pytest.mark.parametrize(
    ("fields", "budget", "name"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 6}}, 6, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 6}, "thinking_budget": 7}, 7, "thinking_budget"),
        ({"thinking": True}, None, "thinking_tokens"),
    ],
)
def test_the_limit_of_reasoning_may_have_the_name_of_another_api(fields, budget, name):
    body = {"model": MODEL, "messages": HI, **fields}

    asked = msgspec.json.decode(json.dumps(body), type=ChatRequest).conversation({}, 100)

    assert (asked.params.thinking_tokens, asked.budget_param) == (budget, name)


def test_a_wrong_limit_of_reasoning_is_named_as_the_client_named_it(service):
    body = {"model": MODEL, "messages": HI, "reasoning": {"max_tokens": -1}}

    error = assert_error(service.http.post("/v1/chat/completions", json=body), 400)

    assert error["param"] == "reasoning.max_tokens"
    assert "reasoning.max_tokens is -1" in error["message"]
