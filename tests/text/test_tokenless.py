"""A service whose checkpoint has no tokenizer accepts and returns token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 2}))
    return Tokenizer(tmp_path)


def test_text_is_refused_with_the_remedy(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="as token ids"):
        tokenizer.encode("hello")


def test_ids_decode_to_no_text_and_end_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, 2, 99]) == ""
    assert tokenizer.eos_ids == (2,)
