"""For every kind of tokenizer, streamed texts, tokens, and bytes of tokens are compared with
transformers.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.openai.logprobs import chat_logprobs, completion_logprobs
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.detokenizer import Detokenizer, token_texts
from dist_aclgraph.text.output import OutputText
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.text.made_tokenizers import KINDS, write_checkpoint

PROMPTS = ["1 + 1 =", "the fox", "been\n", "", "größe 🦊", "<s>"]


@functools.cache
def both(kind: str) -> tuple[Tokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(
            Path(folder), kind, {"clean_up_tokenization_spaces": "word" in kind}
        )
        return Tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def outputs(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw outputs that contain many byte tokens, special tokens, and ids that the tokenizer does
    not know.
    """
    known = range(tokenizer.vocab_size)
    partial = [i for i in known if not tokenizer.token_bytes[i].isascii()]
    special = sorted(tokenizer.special_ids)
    groups = [known, [*sorted(tokenizer.token_bytes.byte_ids), *partial] or known, special]
    return st.lists(st.one_of(*map(st.sampled_from, groups)), min_size=1, max_size=24)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_a_stream_is_the_end_of_what_transformers_decodes(kind, data):
    ours, theirs = both(kind)
    prompt = ours.encode(data.draw(st.sampled_from(PROMPTS)))
    output = data.draw(outputs(ours))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(ours, prompt, skip_special_tokens=skip)

    pieces = [*map(detokenizer.feed, output), detokenizer.finish()]

    before = theirs.decode(prompt, skip_special_tokens=skip)
    whole = theirs.decode([*prompt, *output], skip_special_tokens=skip)
    assert "".join(pieces) == whole[len(before) :]
    texts = detokenizer.take_token_texts()
    assert len(texts) == len(output)
    assert "".join(texts) == "".join(pieces)


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
@pytest.mark.parametrize(("num_bytes", "text"), [(1, "🦝e"), (0, "e")])
def test_bytes_at_the_end_of_a_prompt_become_a_character_or_stay_its_own(kind, num_bytes, text):
    ours, _ = both(kind)
    # Some letters have both a byte token and a token of their own. For such a letter, ``by_bytes``
    # contains the letter's own token.
    ids = sorted(range(ours.vocab_size), key=lambda i: i not in ours.token_bytes.byte_ids)
    by_bytes = {ours.token_bytes[i]: i for i in ids}
    first, *others = [by_bytes[bytes([byte])] for byte in "🦝".encode()]
    detokenizer = Detokenizer(ours, [by_bytes[b"e"], first])
    output = [*(others if num_bytes else ()), by_bytes[b"e"]]

    assert "".join(map(detokenizer.feed, output)) + detokenizer.finish() == text


def test_bytes_at_the_end_of_a_prompt_do_not_remove_a_later_replacement_character():
    ours, _ = both("byte-level")
    half = ours.encode("🦊")[:1]
    detokenizer = Detokenizer(ours, [*ours.encode("a"), *half])
    output = [*ours.encode("b"), *half]

    pieces = [*map(detokenizer.feed, output), detokenizer.finish()]

    assert "".join(pieces) == "b\ufffd"


@pytest.mark.parametrize("kind", ["byte-level", "split byte-level", "byte fallback", "metaspace"])
@pytest.mark.parametrize("prompt", ["1 + 1 =", "</s>the fox\n<s>", "größe 🦊"])
def test_texts_of_the_tokens_of_a_prompt_join_to_the_prompt(kind, prompt):
    ours, _ = both(kind)
    first = ours.encode("<s>")  # a special token that a tokenizer can add before a prompt

    texts = token_texts(ours, [*first, *ours.encode(prompt)], prompt)

    assert "".join(texts) == prompt
    assert texts[: len(first)] == [""] * len(first)


def test_spaces_that_are_cleaned_up_stay_with_the_prompt():
    ours, theirs = both("word piece")
    prompt, output = ours.encode("two is"), ours.encode("the fox")
    detokenizer = Detokenizer(ours, prompt)

    text = "".join(map(detokenizer.feed, output)) + detokenizer.finish()

    assert theirs.decode(prompt) + text == theirs.decode([*prompt, *output])


def test_a_row_without_a_token_does_not_part_bytes():
    ours, theirs = both("byte fallback")
    output = [ours._tokenizer.token_to_id("<0x41>"), ours.vocab_size - 1]
    output += [ours._tokenizer.token_to_id("<0x80>")]
    detokenizer = Detokenizer(ours)

    text = "".join(map(detokenizer.feed, output)) + detokenizer.finish()

    assert text == theirs.decode(output) == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_tokens_offsets_and_bytes_of_log_probabilities_join_to_the_text(kind, data):
    ours, _ = both(kind)
    prompt = ours.encode("1 + 1 =")
    ids = data.draw(outputs(ours))
    others = list(range(3, 13))
    output = OutputText(ours, prompt, SamplingParams())
    text, rows, texts = "", [], []
    for token_id in ids:
        row = RowLogprobs(pack_ints([token_id, *others]), (-1.0,) * 11, 1)
        is_last = len(rows) + len(output._rows) == len(ids) - 1
        piece = output.add_tokens([token_id], [row], "length" if is_last else None)
        text += piece.text
        rows += piece.logprobs
        texts += piece.token_texts

    completion = completion_logprobs(ours, rows, texts, 0)
    chat = chat_logprobs(ours, rows, texts)["content"]

    assert len(rows) == len(ids)
    assert "".join(completion["tokens"]) == text
    assert [text[at:] for at in completion["text_offset"]] == [
        "".join(texts[i:]) for i in range(len(texts))
    ]
    assert all(len(top) == len(others) for top in completion["top_logprobs"])
    joined = b"".join(bytes(entry["bytes"]) for entry in chat)
    if "\ufffd" not in text and "word" not in kind:
        assert joined.decode() == text


def test_the_bytes_of_a_character_are_those_of_its_tokens():
    ours, _ = both("byte fallback")
    ids = [ours._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦝".encode()]
    rows = [RowLogprobs(pack_ints([token_id]), (-1.0,), 1) for token_id in ids]

    content = chat_logprobs(ours, rows, ["", "", "", "🦝"])["content"]

    assert [entry["bytes"] for entry in content] == [[byte] for byte in "🦝".encode()]
    assert [entry["token"] for entry in content] == ["", "", "", "🦝"]


def described(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False} | flags


ADDED = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "900": described("<|new|>", special=True),
                "901": described("<think>", special=False),
                "0": described("<unk>", special=True),
            },
            "eos_token": "<|new|>",
            "image_token": "<|image|>",
            "extra_special_tokens": {"audio_token": "<|audio|>"},
        }
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {
            "additional_special_tokens": ["<|extra|>", "<s>"],
            "bos_token": described("<s>", normalized=True) | {"__type": "AddedToken"},
        }
    },
    "extra tokens that tokenizer.json has as text": {
        "tokenizer_config.json": {"extra_special_tokens": ["<tool>", "<|extra|>"]}
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": described("<tool>")},
        # as in tokenizer.json
        "tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": True},
    },
    "added_tokens.json": {
        "added_tokens.json": {"<|late|>": 901, "<|early|>": 900},
        "tokenizer_config.json": {"pad_token": "<|late|>", "add_eos_token": True},
    },
}


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
@pytest.mark.parametrize("case", ADDED)
def test_tokens_that_other_files_add_are_those_of_transformers(tmp_path, case, kind):
    write_checkpoint(tmp_path, kind, {})
    for name, content in ADDED[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "a <|new|><think>b<|extra|> <|audio|><|image|><|begin|><tool><|late|> <|early|> c"

    ids = ours.encode(text)

    assert ids == theirs(text)["input_ids"]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip)
    named = set(theirs.all_special_ids) - {None}
    assert ours.special_ids >= {i for i in named if not theirs.decode([i], True)}


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback that strips nothing"])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("e<|right|>  e", ["e", "<|right|>  ", "e"]),
        ("e<|right|>\n", ["e", "<|right|>\n"]),
        ("e \n<|left|>e", ["e \n", "<|left|>", "e"]),
        ("  <|left|><|right|> <|left|>e", ["  <|left|>", "<|right|> ", "<|left|>", "e"]),
    ],
)
def test_an_echo_has_the_white_space_beside_special_tokens(tmp_path, kind, prompt, texts):
    added = {
        "900": described("<|right|>", rstrip=True, special=True),
        "901": described("<|left|>", lstrip=True, special=True),
    }
    write_checkpoint(tmp_path, kind, {"added_tokens_decoder": added})
    ours = Tokenizer(tmp_path)

    assert token_texts(ours, ours.encode(prompt), prompt) == texts


def test_the_tokenizers_own_end_token_ends_an_answer(tmp_path):
    write_checkpoint(tmp_path, "byte-level", {"eos_token": "<|im_end|>"})
    rows = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(rows | {"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')

    tokenizer = Tokenizer(tmp_path)

    assert tokenizer.eos_ids == (1, tokenizer.encode("<|im_end|>")[0])
