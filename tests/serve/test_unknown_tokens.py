"""Texts with tokens of the tokenizer for which the model has no row are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import CONFIG, serving

MODEL = CONFIG.parents[1] / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a service whose tokenizer has one more token than the model has rows."""
    directory: Path = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(MODEL, directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    known = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"].append(known | {"id": vocab_size, "content": "<|pad|>"})
    file.write_text(json.dumps(tokenizer))
    with serving(model=str(directory)) as service:
        yield service


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1 + <|pad|>"}),
        ("/v1/completions", {"prompt": ["1 + 1", "1 + <|pad|>"]}),
        ("/v1/completions", {"prompt": "1 + <|pad|>", "echo": True, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|pad|>"}]}),
        ("/tokenize", {"prompt": "1 + <|pad|>"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "<|pad|>"}]}),
    ],
)
def test_a_text_with_a_token_that_the_model_lacks_is_refused_with_its_id_and_the_limit(
    service: Any, path: str, body: dict[str, Any]
) -> None:
    vocab_size = service.state.tokenizer.vocab_size

    answer = service.http.post(path, json={"model": "model", **body})

    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"'<|pad|>', which is token {vocab_size}" in message
    assert f"[0, {vocab_size})" in message
    assert not service.engine.submitted
