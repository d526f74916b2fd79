"""A text is refused if it contains a token that the tokenizer has, but for which the model has no
embedding row.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import CONFIG, serving
from tests.serve.rerank_model import make_reranker

MODEL = CONFIG.parents[1] / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a function that returns a service for a task.

    The tokenizer of this service has one token more than the model has embedding rows.
    """
    with ExitStack() as stack:

        def serve(task: str) -> Any:
            directory: Path = tmp_path_factory.mktemp(task) / "model"
            if task == "rerank":
                directory.mkdir()
                make_reranker(directory)
            else:
                shutil.copytree(MODEL, directory)
            file = directory / "tokenizer.json"
            tokenizer = json.loads(file.read_text())
            vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
            known = tokenizer["added_tokens"][0]
            tokenizer["added_tokens"].append(known | {"id": vocab_size, "content": "<|pad|>"})
            file.write_text(json.dumps(tokenizer))
            return stack.enter_context(serving(model=str(directory), task=task))

        yield cache(serve)


CHAT = [{"role": "user", "content": "<|pad|>"}]
TEXT = "1 + <|pad|>"


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        ("/v1/completions", {"prompt": TEXT}, "generate"),
        ("/v1/completions", {"prompt": ["1 + 1", TEXT]}, "generate"),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 0}, "generate"),
        ("/v1/chat/completions", {"messages": CHAT}, "generate"),
        ("/v1/completions", {"prompt": "1", "bad_words": [TEXT]}, "generate"),
        ("/v1/responses", {"input": TEXT}, "generate"),
        ("/v1/responses/input_tokens", {"input": TEXT}, "generate"),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}, "generate"),
        ("/v1/messages/count_tokens", {"messages": CHAT}, "generate"),
        ("/v1/embeddings", {"input": TEXT}, "embed"),
        ("/v1/score", {"text_1": "1", "text_2": TEXT}, "rerank"),
        ("/v1/rerank", {"query": TEXT, "documents": ["1"]}, "rerank"),
        ("/tokenize", {"prompt": TEXT}, "generate"),
        ("/tokenize", {"messages": CHAT}, "generate"),
    ],
)
def test_a_text_with_a_token_that_the_model_lacks_is_refused_with_its_id_and_the_limit(
    services: Any, path: str, body: dict[str, Any], task: str
) -> None:
    service = services(task)
    vocab_size = service.state.tokenizer.vocab_size

    answer = service.http.post(path, json={"model": "model", **body})

    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"'<|pad|>', which is token {vocab_size}" in message
    assert f"[0, {vocab_size})" in message
    assert not service.engine.submitted
