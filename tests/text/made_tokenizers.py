"""Makes small tokenizers of the kinds that published checkpoints have, trained on a few words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXTS = [
    "the fox said: it isn't 1 + 1 = 2 , is it ?",
    "größe 你好 мир 🦊🙂 été \n\n  two  spaces",
] * 9
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROLS = ["<unk>", "<s>", "</s>"]
SPACES = "\u2581"


def byte_level(*, prefix_space: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer, like those of GPT-2, Llama 3, Qwen and DeepSeek."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer, initial_alphabet=alphabet)


def split_byte_level() -> Tokenizer:
    """Return a byte-level tokenizer with an additional pattern that splits digits."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\s+|[^\s\d]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """Return a BPE tokenizer with the steps of tokenizers that are converted from SentencePiece. If
    ``strips``, the tokenizer removes the first space of a text, as Llama 2's tokenizer does.
    Otherwise, it keeps the space, as Gemma's tokenizer does.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend(SPACES)] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACES)])
    own = [decoders.Replace(SPACES, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*own, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACES, "merged_with_next")
    controls = [*CONTROLS, *BYTES]
    _trained(tokenizer, trainers.BpeTrainer, special_tokens=controls, limit_alphabet=24)
    # The trainer makes all tokens in ``controls`` special tokens, but byte tokens must not be
    # special.
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = written["added_tokens"][: len(CONTROLS)]
    return Tokenizer.from_str(json.dumps(written))


def unigram(*, has_bytes: bool = False) -> Tokenizer:
    """Return a unigram tokenizer. If ``has_bytes``, the tokenizer has byte tokens, as the
    tokenizers of LLMs have. Otherwise, it has no byte tokens, like the tokenizers of T5 and XLNet.
    """
    pieces = [(token, 0.0) for token in CONTROLS]
    pieces += [(byte, 0.0) for byte in BYTES] if has_bytes else []
    words = sorted({word for text in TEXTS for word in text.split()})
    pieces += [(SPACES + word, -4.0) for word in words] + [(SPACES, -3.0)]
    pieces += [(char, -6.0) for char in sorted(set("".join(words)))]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, has_bytes))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace = decoders.Metaspace()
    tokenizer.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if has_bytes else metaspace
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a BPE tokenizer without byte tokens. Each word includes the space before the word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _trained(tokenizer, trainers.BpeTrainer)


def word_piece() -> Tokenizer:
    """Return a tokenizer like BERT's: in a word, each part after the first part begins with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _trained(tokenizer, trainers.WordPieceTrainer)


def word_ends() -> Tokenizer:
    """Return a tokenizer like those of CLIP and GPT-1: the last part of a word ends with </w>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _trained(tokenizer, trainers.BpeTrainer, end_of_word_suffix="</w>")


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level with its first space": lambda: byte_level(prefix_space=True),
    "split byte-level": split_byte_level,
    "byte fallback": byte_fallback,
    "byte fallback that strips nothing": lambda: byte_fallback(strips=False),
    "unigram": unigram,
    "unigram with bytes": lambda: unigram(has_bytes=True),
    "metaspace": metaspace,
    "word piece": word_piece,
    "word ends": word_ends,
}


def write_checkpoint(directory: Path, kind: str, described: dict[str, Any]) -> Path:
    """Write a tokenizer of ``kind``, and a config.json. The vocabulary size in config.json is
    larger than the tokenizer's.

    Args:
        described: the content of tokenizer_config.json.
    """
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    rows = {"vocab_size": tokenizer.get_vocab_size() + 20, "max_position_embeddings": 512}
    rows["hidden_size"] = 8
    (directory / "config.json").write_text(json.dumps(rows))
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def _trained(tokenizer: Tokenizer, trainer: Any, **options: Any) -> Tokenizer:
    options = {"special_tokens": CONTROLS, "show_progress": False, **options}
    size = 200 + len(options["special_tokens"]) + len(options.get("initial_alphabet", ()))
    tokenizer.train_from_iterator(TEXTS, trainer(vocab_size=size, **options))
    return tokenizer
