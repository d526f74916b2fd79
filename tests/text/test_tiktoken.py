"""A tokenizer from a file tiktoken.model gives the tokens that tiktoken's rule gives."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from dist_aclgraph.errors import ModelError
from dist_aclgraph.text.tiktoken_file import PATTERN
from dist_aclgraph.text.token_bytes import TokenBytes
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.text.made_tokenizers import byte_level

PARTS = [
    "the fox",
    "it isn't",
    " 1234567",
    "größe",
    "你好",
    "你a",
    "\n\n",
    "  ",
    "🦊",
    "ÉTÉ",
    "_!\r\n",
]
ADDED = {"0": "[BOS]", "1": "[EOS]", "2": "<|im_end|>", "200": "<|last|>"}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Return the tokens of a small byte-level vocabulary with their ranks, which follow the order
    of its merges.
    """
    made = byte_level()
    added = set(made.get_added_tokens_decoder())
    vocabulary = {text: i for text, i in made.get_vocab().items() if i not in added}
    bytes_of = TokenBytes(made, vocabulary)
    order = {bytes_of[i]: i for i in vocabulary.values()}
    tokens = sorted(order, key=lambda token: (len(token) > 1, order[token]))
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def tokenizer(ranks, tmp_path_factory) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("kimi"), ranks))


def write(folder: Path, ranks: dict[bytes, int]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(ranks) + int(i)): {"content": text, "special": text != "<|last|>"}
        for i, text in ADDED.items()
    }
    described = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    config = {"vocab_size": len(ranks) + 256, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tokens_of(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Return the tokens of a piece of text. While pairs of neighbours form tokens, merge the pair
    whose token has the lowest rank.
    """
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        merged = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        lowest = min(merged, default=len(ranks))
        if lowest == len(ranks):
            return [ranks[part] for part in parts]
        i = merged.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=6).map("".join))
def test_a_text_has_the_tokens_of_tiktoken(tokenizer, ranks, text):
    pieces = regex.findall(PATTERN, text, flags=regex.V1)

    ids = tokenizer.encode(text)

    assert ids == [i for piece in pieces for i in tokens_of(piece.encode(), ranks)]
    assert tokenizer.decode(ids) == text


def test_added_tokens_have_their_ids_and_the_others_are_reserved(tokenizer, ranks):
    n = len(ranks)

    ids = tokenizer.encode(f"[BOS]<|im_end|><|last|><|reserved_token_{n + 3}|>")

    assert ids == [n, n + 2, n + 200, n + 3]
    assert tokenizer.decode([n + 2, n + 200, n + 3]) == "<|last|>"
    assert tokenizer.eos_ids == (n + 1,)


def test_an_error_of_the_library_names_the_file(tmp_path, ranks, monkeypatch):
    write(tmp_path, ranks)
    monkeypatch.setattr(models, "BPE", lambda *args, **options: int("x"))

    with pytest.raises(ModelError, match=r"tiktoken\.model is not a tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("line", ["YQ== x", "YQ==", "? 1", "YQ== 5"])
def test_a_broken_file_is_a_model_error(tmp_path, ranks, line):
    write(tmp_path, ranks)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line)

    with pytest.raises(ModelError, match=r"tiktoken\.model"):
        Tokenizer(tmp_path)
