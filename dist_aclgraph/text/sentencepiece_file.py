"""Makes a tokenizer from SentencePiece's ``tokenizer.model``, for checkpoints without
tokenizer.json.

The result encodes and decodes as SentencePiece does, but it can also have added tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dist_aclgraph.errors import ModelError, UnsupportedModelError

SPACE = "\u2581"  # SentencePiece writes this character instead of a space
REMEDY = "add tokenizer.json, or remove the file to serve prompts of token ids only"
proto: Any = sentencepiece_model_pb2  # type checkers do not see the classes of this module
UNIGRAM, BPE = proto.TrainerSpec.UNIGRAM, proto.TrainerSpec.BPE
Piece = proto.ModelProto.SentencePiece


def read_sentencepiece(path: Path, described: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file of SentencePiece describes.

    Args:
        described: the content of the checkpoint's tokenizer_config.json, with the rules for tokens
            that are added to a text. A key that is null counts as absent.

    Raises:
        ModelError: the file cannot be read.
        UnsupportedModelError: the model is neither a BPE nor a unigram model, or has unused pieces.
    """
    described = {key: value for key, value in described.items() if value is not None}
    model = proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as e:
        raise ModelError(f"{path} is not a model of SentencePiece ({e}); {REMEDY}") from None
    if not model.pieces:
        raise ModelError(f"{path} is not a model of SentencePiece (it has no pieces); {REMEDY}")
    # SentencePiece divides unused pieces into other pieces. The library ``tokenizers`` cannot do
    # this.
    if any(piece.type == Piece.UNUSED for piece in model.pieces):
        raise UnsupportedModelError(f"{path} has unused pieces, which are not supported: {REMEDY}")
    tokenizer = Tokenizer(_read_model(path, model))
    has_prefix = bool(described.get("add_prefix_space", model.normalizer_spec.add_dummy_prefix))
    steps = _normalizers(model.normalizer_spec)
    if described.get("legacy", True):
        # A space is put before the first text, and before each text after an added token.
        steps += [normalizers.Prepend(SPACE)] * has_prefix
        steps.append(normalizers.Replace(" ", SPACE))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, prepend_scheme="first" if has_prefix else "never", split=False
        )
    tokenizer.normalizer = normalizers.Sequence(steps)
    joins = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(joins + [decoders.Strip(" ", 1, 0)] * has_prefix)
    tokenizer.add_tokens(list(_symbols(model.pieces)))
    _add_ends(tokenizer, model, described)
    return tokenizer


def _read_model(path: Path, model: Any) -> models.Model:
    kind, trained = model.trainer_spec.model_type, model.trainer_spec
    if kind == UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        return models.Unigram(pieces, trained.unk_id, trained.byte_fallback)
    if kind != BPE:
        name = proto.TrainerSpec.ModelType.Name(kind).lower()
        raise UnsupportedModelError(
            f"{path} is a {name} model of SentencePiece; supported: bpe, unigram: {REMEDY}"
        )
    return models.BPE(
        {piece.piece: index for index, piece in enumerate(model.pieces)},
        _merges(model.pieces),
        unk_token=trained.unk_piece,
        fuse_unk=True,
        byte_fallback=trained.byte_fallback,
    )


def _merges(pieces: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the merges of BPE, highest priority first: pairs of pieces that together form another
    piece.
    """
    ids = {piece.piece: i for i, piece in enumerate(pieces) if piece.type == Piece.NORMAL}
    found = [
        (-piece.score, ids[left], ids[right], left, right)
        for piece in pieces
        if piece.type == Piece.NORMAL
        for left, right in _halves(piece.piece)
        if left in ids and right in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _halves(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:i], text[i:]) for i in range(1, len(text)))


def _normalizers(spec: Any) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _symbols(pieces: Iterable[Any]) -> Iterator[AddedToken]:
    """Yield the pieces that become added tokens: special tokens, and texts that are always one
    token.
    """
    for piece in pieces:
        if piece.type in (Piece.CONTROL, Piece.UNKNOWN):
            yield AddedToken(piece.piece, special=True, normalized=False)
        elif piece.type == Piece.USER_DEFINED:
            yield AddedToken(piece.piece, special=False, normalized=False)


def _add_ends(tokenizer: Tokenizer, model: Any, described: Mapping[str, Any]) -> None:
    """Let the tokenizer add a token before or after each text, as the checkpoint describes."""
    trained = model.trainer_spec
    begin, end = trained.bos_piece, trained.eos_piece
    adds_begin = described.get("add_bos_token", trained.bos_id >= 0)
    adds_end = described.get("add_eos_token", False)
    pattern = [*[begin] * bool(adds_begin), "$A", *[end] * bool(adds_end)]
    used = {text: tokenizer.token_to_id(text) for text in pattern if text != "$A"}
    if used and None not in used.values():
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pattern, special_tokens=list(used.items())
        )
