"""POST /v1/score and /v1/rerank, with a fake engine."""

from __future__ import annotations

import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.serve.pooling.types import MAX_INPUTS
from dist_aclgraph.text.rerank import RerankPrompts
from tests.serve.conftest import serving
from tests.serve.http.test_hostile_bodies import filled
from tests.serve.openai.test_errors import assert_error
from tests.serve.rerank_model import make_reranker

MODEL = "reranker"
RERANKS = ["/v1/rerank", "/rerank", "/v2/rerank"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    directory = make_reranker(tmp_path_factory.mktemp("model"))
    with serving(model=str(directory), task="rerank", served_model_name=MODEL) as service:

        def share(ids: list[int]) -> float:
            """Return a probability that grows with the number of vowels in the document."""
            text = service.state.tokenizer.decode(ids)
            document = text.partition("<Document>: ")[2]
            return (1 + sum(document.count(vowel) for vowel in "aeiou")) / 40

        service.engine.share = share
        yield service


DOCUMENTS = ["xyz", "aeiou aeiou", "banana", "cry"]  # with 0, 10, 3 and 0 vowels
SCORES = [0.2, 0.45, 0.275, 0.2]


def scores_of(documents, base):
    return [base + sum(d.count(v) for v in "aeiou") / 40 for d in documents]


@pytest.fixture(scope="module")
def base(reranker):
    """Return the score of a document without vowels."""
    reply = reranker.http.post("/v1/score", json={"model": MODEL, "text_1": "q", "text_2": "xyz"})
    return reply.json()["data"][0]["score"]


@pytest.mark.parametrize("path", RERANKS)
def test_documents_come_in_the_order_of_their_relevance(reranker, base, path):
    reply = reranker.http.post(
        path, json={"model": MODEL, "query": "q", "documents": DOCUMENTS}
    ).json()

    scores = scores_of(DOCUMENTS, base)
    assert [result["index"] for result in reply["results"]] == [1, 2, 0, 3]
    for result in reply["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]])
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert reply["model"] == MODEL
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0


def test_only_the_best_documents_and_no_texts(reranker):
    documents = ["xyz", {"text": "aeiou"}, "banana"]
    body = {"model": MODEL, "query": "q", "documents": documents}

    reply = reranker.http.post(
        "/v1/rerank", json={**body, "top_n": 2, "return_documents": False}
    ).json()

    assert [set(result) for result in reply["results"]] == [{"index", "relevance_score"}] * 2
    assert [result["index"] for result in reply["results"]] == [1, 2]


def test_no_number_of_best_documents_means_all(reranker):
    body = {"model": MODEL, "query": "q", "documents": DOCUMENTS, "top_n": 0}

    assert len(reranker.http.post("/v1/rerank", json=body).json()["results"]) == len(DOCUMENTS)


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
def test_the_end_of_a_long_document_may_be_left_out(reranker, path):
    reranker.engine.submitted.clear()
    names = ("text_1", "text_2") if path == "/v1/score" else ("query", "documents")
    body = {"model": MODEL, **dict(zip(names, ("q", ["x y " * 4000]), strict=True))}

    for most, expected in ((400, 400), (-1, reranker.state.context_len - 1)):
        reply = reranker.http.post(path, json={**body, "truncate_prompt_tokens": most})
        assert reply.status_code == 200, reply.text
        assert len(unpack_ints(reranker.engine.submitted[-1].prompt)) == expected


def test_the_engine_gets_the_prompt_of_the_model(reranker):
    reranker.engine.submitted.clear()

    reranker.http.post(
        "/v1/rerank",
        json={"model": MODEL, "query": "a q", "documents": ["a d"], "instruction": "do it"},
    )

    (submit,) = reranker.engine.submitted
    prompts = RerankPrompts(reranker.state.tokenizer)
    ids = prompts.encode("a q", "a d", "do it", max_tokens=500)
    assert unpack_ints(submit.prompt).tolist() == ids
    assert submit.sampling.structure == prompts.params.structure
    assert submit.max_tokens == 1


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "banana", [("q", "banana")]),
        ("q", DOCUMENTS, [("q", document) for document in DOCUMENTS]),
        (["q"], DOCUMENTS[:2], [("q", document) for document in DOCUMENTS[:2]]),
        (["q", "r"], DOCUMENTS[:2], [("q", DOCUMENTS[0]), ("r", DOCUMENTS[1])]),
    ],
)
@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/score", ("text_1", "text_2")),
        ("/v1/score", ("queries", "documents")),
        ("/score", ("text_1", "text_2")),
    ],
)
def test_every_pair_has_its_score(reranker, base, first, second, pairs, path, names):
    body = {"model": MODEL, names[0]: first, names[1]: second}

    reply = reranker.http.post(path, json=body).json()

    assert [each["index"] for each in reply["data"]] == list(range(len(pairs)))
    found = [each["score"] for each in reply["data"]]
    assert found == pytest.approx(scores_of([document for _, document in pairs], base))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "", "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "q"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x", ""]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": "x"}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [1]}, "documents.0"),
        ("/v1/rerank", {"query": "q", "documents": [{}]}, "documents.0.text"),
        ("/v1/rerank", {"query": "q", "documents": ["x"] * (MAX_INPUTS + 1)}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["x " * 4000]}, "documents"),
        ("/v1/score", {"text_1": "q", "text_2": "x " * 4000}, "text_2"),
        (
            "/v1/score",
            {"text_1": "q", "text_2": "x", "truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
        ),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["x"], "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
        ),
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"text_2": "q"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "q", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": [["x"]]}, "text_2.0"),
        ("/v1/score", {"text_1": "q", "text_2": ["x"] * (MAX_INPUTS + 1)}, "text_2"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_body_is_refused_with_its_field(reranker, path, body, param):
    assert (
        assert_error(reranker.http.post(path, json={"model": MODEL, **body}), 400)["param"] == param
    )


def test_a_reranker_answers_chats_but_has_no_embeddings(reranker):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    assert reranker.http.post("/v1/chat/completions", json=chat).is_success
    assert_error(reranker.http.post("/v1/embeddings", json={"model": MODEL, "input": "x"}), 404)


@pytest.mark.parametrize("path", RERANKS)
def test_a_model_for_texts_has_no_scores(service, path):
    body = {"model": "tiny-qwen3", "query": "q", "documents": ["x"]}

    assert assert_error(service.http.post(path, json=body), 404)["param"] == "model"


@pytest.mark.parametrize("item", [b"{}", b'{"text":"x"}', b'{"a":{}}', b'""', b"[]", rb'"\u1234"'])
def test_a_body_made_to_hurt_is_refused(reranker, item):
    head = b'{"model":"reranker","query":"q","documents":['

    reply = reranker.http.post("/v1/rerank", content=filled(head, item, b"]}"))

    assert reply.status_code in (400, 413)
