"""POST /v1/embeddings, with a fake engine."""

from __future__ import annotations

import base64
import time

import numpy as np
import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.serve.pooling.portions import PORTION
from dist_aclgraph.serve.pooling.types import MAX_INPUTS
from tests.serve.conftest import serving
from tests.serve.http.test_hostile_bodies import filled
from tests.serve.openai.test_errors import CHAT, MODEL, TEXT, assert_error

URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedder():
    with serving(task="embed") as service:
        size = service.state.task.hidden_size
        service.engine.embedding = lambda ids: state_of(ids, size)
        yield service


def state_of(ids: list[int], size: int) -> list[float]:
    return (np.random.RandomState(sum(ids)).randn(size) * 3).tolist()


def expected(embedder, ids: list[int], dimensions: int | None = None) -> np.ndarray:
    """Return the first ``dimensions`` elements of the prompt's hidden state, normalized to length
    1.
    """
    state = np.array(state_of(ids, embedder.state.task.hidden_size), np.float32)[:dimensions]
    return state / np.linalg.norm(state.astype(np.float64))


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize(
    ("given", "count"),
    [("Once", 1), (["Once", "upon a", "Once"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
def test_every_form_of_input_has_its_embedding_in_order(embedder, given, count, form):
    settings = {} if form is None else {"encoding_format": form}
    reply = embedder.openai.embeddings.create(model=MODEL, input=given, **settings)

    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    encode = embedder.state.tokenizer.encode
    prompts = [encode(text) if isinstance(text, str) else text for text in texts]
    assert [each.index for each in reply.data] == list(range(count))
    for each, ids in zip(reply.data, prompts, strict=True):
        value = each.embedding
        if isinstance(value, str):  # the client decodes base64 only if no format was requested
            value = np.frombuffer(base64.b64decode(value), "<f4")
        assert np.asarray(value) == pytest.approx(expected(embedder, ids), abs=1e-6)
    num_tokens = sum(map(len, prompts))
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)
    assert (reply.object, reply.model) == ("list", MODEL)


def test_answers_have_an_id_and_a_time_as_those_of_vllm(embedder):
    found = [embedder.http.post(URL, json={"model": MODEL, "input": "x"}).json() for _ in range(2)]

    assert len({each["id"] for each in found}) == 2  # Mistral's client demands an id
    assert all(each["id"].startswith("embd-") for each in found)
    assert found[0]["created"] <= found[1]["created"] <= time.time()


def test_floats_and_base64_are_equal_bit_by_bit(embedder):
    found = [
        embedder.http.post(URL, json={"model": MODEL, "input": "x", "encoding_format": form})
        for form in ("float", "base64")
    ]

    floats, encoded = (reply.json()["data"][0]["embedding"] for reply in found)
    assert np.array(floats, np.float32).tobytes() == base64.b64decode(encoded)


def test_dimensions_cut_the_embedding_before_it_is_normalised(embedder):
    reply = embedder.openai.embeddings.create(model=MODEL, input=[5, 6], dimensions=3)

    value = np.array(reply.data[0].embedding)
    assert value == pytest.approx(expected(embedder, [5, 6], 3), abs=1e-6)
    assert np.linalg.norm(value) == pytest.approx(1.0)


def test_the_engine_is_asked_for_a_state_and_one_token(embedder):
    embedder.engine.submitted.clear()

    embedder.openai.embeddings.create(model=MODEL, input=[70, 71])

    (submit,) = embedder.engine.submitted
    assert unpack_ints(submit.prompt).tolist() == [70, 71]
    assert submit.sampling.embeds
    assert (submit.max_tokens, submit.stop_token_ids) == (1, ())


def test_many_inputs_run_in_portions(embedder):
    inputs = [[5 + i % 300] for i in range(2 * PORTION + 3)]

    reply = embedder.openai.embeddings.create(model=MODEL, input=inputs)

    for each, ids in zip(reply.data, inputs, strict=True):
        assert np.array(each.embedding) == pytest.approx(expected(embedder, ids), abs=1e-6)
    assert embedder.state.slots.taken == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": [[5], []]}, "input"),
        ({"input": [5, "x"]}, "input.1"),
        ({"input": {"a": 1}}, "input"),
        ({"input": None}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [[5]] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [5] * 2048}, "input"),
        ({"input": [[5] * 2048]}, "input"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 10**6}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_body_is_refused_with_its_field(embedder, body, param):
    reply = embedder.http.post(URL, json={"model": MODEL, **body})

    assert assert_error(reply, 400)["param"] == param


def test_texts_that_are_too_long_are_refused(embedder):
    reply = embedder.http.post(URL, json={"model": MODEL, "input": "x y " * 3000})

    error = assert_error(reply, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("given", ["x y " * 3000, [5, 6] * 3000], ids=["text", "ids"])
@pytest.mark.parametrize("most", [3, -1])
def test_inputs_may_be_truncated(embedder, given, most):
    embedder.engine.submitted.clear()

    reply = embedder.http.post(
        URL, json={"model": MODEL, "input": given, "truncate_prompt_tokens": most}
    )

    assert reply.status_code == 200, reply.text
    (submit,) = embedder.engine.submitted
    ids = given if isinstance(given, list) else embedder.state.tokenizer.encode(given)
    kept = most if most > 0 else embedder.state.context_len - 1
    assert unpack_ints(submit.prompt).tolist() == ids[-kept:]


def test_a_failed_input_fails_the_request(embedder):
    embedder.engine.fail_after = (0, "NonFiniteLogitsError")
    try:
        reply = embedder.http.post(URL, json={"model": MODEL, "input": ["a", "b"]})
    finally:
        embedder.engine.fail_after = None

    assert_error(reply, 500)
    assert embedder.state.slots.taken == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (TEXT, {"prompt": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_a_model_for_embeddings_does_nothing_else(embedder, path, body):
    reply = embedder.http.post(path, json={"model": MODEL, **body})

    assert assert_error(reply, 404)["param"] == "model"
    assert "has the task embed; this endpoint needs" in reply.json()["error"]["message"]


def test_the_smaller_endpoints_serve_every_task(embedder):
    tokens = embedder.http.post("/tokenize", json={"model": MODEL, "prompt": "Once"}).json()

    assert embedder.http.post("/detokenize", json={"model": MODEL, "tokens": [5]}).is_success
    assert embedder.http.get(f"/v1/models/{MODEL}").is_success
    assert tokens["count"] == len(embedder.state.tokenizer.encode("Once"))


def test_a_model_for_texts_has_no_embeddings(service):
    reply = service.http.post(URL, json={"model": MODEL, "input": "x"})

    assert assert_error(reply, 404)["param"] == "model"


@pytest.mark.parametrize("item", [b"{}", b"[]", b"[1]", b"1", b'""', rb'"\u1234"', b"[[]]"])
def test_a_body_made_to_hurt_is_refused(embedder, item):
    reply = embedder.http.post(URL, content=filled(b'{"model":"tiny-qwen3","input":[', item, b"]}"))

    assert reply.status_code in (400, 413)
