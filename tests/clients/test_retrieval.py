"""langchain-openai, litellm and the openai client get embeddings and scores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import run_python, serving
from tests.serve.rerank_model import make_reranker

TEXTS = ["Count from 3 to 9.", "Once upon a time", "1 2 3"]
EMBEDDINGS = f"""
import json, os
from langchain_openai import OpenAIEmbeddings
model = OpenAIEmbeddings(model="tiny-qwen3", base_url=os.environ["API"], api_key="none",
                         check_embedding_ctx_length=False)
short = OpenAIEmbeddings(model="tiny-qwen3", base_url=os.environ["API"], api_key="none",
                         check_embedding_ctx_length=False, dimensions=16)
texts = {TEXTS!r}
print(json.dumps({{
    "all": model.embed_documents(texts),
    "one": model.embed_query(texts[1]),
    "many": model.embed_documents(texts * 200),
    "short": short.embed_query(texts[1]),
}}))
"""
RERANK = f"""
import json, os, litellm
reply = litellm.rerank(model="hosted_vllm/reranker", query="q", documents={TEXTS!r}, top_n=2,
                       api_base=os.environ["URL"], api_key="none")
print(json.dumps([[each["index"], each["relevance_score"], each["document"]["text"]]
                  for each in reply.results]))
"""


def test_langchain_embeds(embedder):
    found = run_python("langchain_openai", EMBEDDINGS, API=embedder.api)

    every = np.array(found["all"])
    assert np.linalg.norm(every, axis=1) == pytest.approx([1.0] * 3)
    assert found["one"] == pytest.approx(found["all"][1], abs=1e-4)
    assert np.array(found["many"]) == pytest.approx(np.tile(every, (200, 1)), abs=1e-4)
    cut = every[1][:16]
    assert found["short"] == pytest.approx(cut / np.linalg.norm(cut), abs=1e-4)


def test_litellm_reranks(tmp_path_factory):
    model = make_reranker(tmp_path_factory.mktemp("model"))
    keys = f"model={model}", "task=rerank", "weights=dummy", "served_model_name=reranker"
    with serving(tmp_path_factory.mktemp("reranker"), *keys) as service:
        found = run_python("litellm", RERANK, URL=service.url)

    # All weights of the model are zero, so both answers are equally probable, and the order of the
    # texts does not change.
    assert found == [[0, 0.5, TEXTS[0]], [1, 0.5, TEXTS[1]]]
