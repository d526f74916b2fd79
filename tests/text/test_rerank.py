from __future__ import annotations

import math

import pytest

from dist_aclgraph.errors import InvalidParameterError, RequestTooLongError, UnsupportedModelError
from dist_aclgraph.text.rerank import TAIL, RerankPrompts
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.serve.conftest import CONFIG
from tests.serve.rerank_model import make_reranker

TINY = CONFIG.parents[1] / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_reranker(tmp_path_factory.mktemp("reranker")))


def test_the_prompt_is_that_of_the_model_card(tokenizer: Tokenizer) -> None:
    prompts = RerankPrompts(tokenizer)

    ids = prompts.encode("a q", "a d", max_tokens=500)
    own = prompts.encode("a q", "a d", "do it", max_tokens=500)

    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert text.endswith(
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: a q\n<Document>: a d<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert "<Instruct>: do it\n" in tokenizer.decode(own)


def test_a_document_that_is_too_long_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestTooLongError):
        RerankPrompts(tokenizer).encode("q", "x " * 100, max_tokens=50)


def test_the_end_of_a_long_document_is_left_out(tokenizer: Tokenizer) -> None:
    prompts = RerankPrompts(tokenizer)
    least = len(prompts.encode("q", "", max_tokens=500))

    ids = prompts.encode("q", "x " * 9000, max_tokens=500, most=least + 3)
    short = prompts.encode("q", "x", max_tokens=500, most=500)

    assert len(ids) == least + 3
    assert "<Query>: q\n<Document>: x" in tokenizer.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(TAIL)
    assert short == prompts.encode("q", "x", max_tokens=500)
    with pytest.raises(InvalidParameterError, match=f"without its document has {least} tokens"):
        prompts.encode("q", "x", max_tokens=500, most=least - 1)


def test_the_score_is_the_share_of_yes(tokenizer: Tokenizer) -> None:
    yes, no = (tokenizer.encode(answer)[0] for answer in ("yes", "no"))

    prompts = RerankPrompts(tokenizer)

    assert prompts.score({yes: math.log(0.9), no: math.log(0.1)}) == pytest.approx(0.9)
    assert 0.0 <= prompts.score({yes: -1e4, no: 0.0}) < 1e-300


def test_a_vocabulary_without_the_answers_is_one_sentence() -> None:
    with pytest.raises(UnsupportedModelError, match="'yes' is no token of this model"):
        RerankPrompts(Tokenizer(TINY))
