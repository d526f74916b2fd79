"""TokenBytes: the bytes that each token adds in the middle of a text."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of tokens by id; computed at the first access to a token, and then kept.

    Attributes:
        byte_ids: tokens that stand for one byte each (SentencePiece's ``<0x0A>``). The library's
            decoder joins a run of these tokens. If the run is not UTF-8, the decoder replaces all
            bytes of the run.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> None:
        kinds = _decoder_kinds(tokenizer.decoder)
        self._tokenizer = tokenizer
        self._byte_of_char = byte_of_char() if "ByteLevel" in kinds else None
        self.byte_ids: frozenset[int] = frozenset()
        if "ByteFallback" in kinds:
            byte_tokens = [i for token, i in vocabulary.items() if _BYTE.fullmatch(token)]
            self.byte_ids = frozenset(byte_tokens)
        self._only_joins = kinds == {"ByteLevel"}
        self._known: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        # Ids of a short text. These ids are put before a token that is decoded, because some
        # tokenizers decode the first token of a text differently.
        self._before: list[int] = []
        if self._byte_of_char is None and vocabulary:
            self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """Return the text that a token always adds if the bytes before it are whole characters.

        Return None if the text may depend on other tokens. There are two such cases: the token's
        bytes are not whole characters, or the decoder does more than join bytes.
        """
        if not self._only_joins:
            return None
        if token_id not in self._whole:
            text = self[token_id].decode(errors="ignore")
            self._whole[token_id] = text if text.encode() == self[token_id] else None
        return self._whole[token_id]

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the model has a row for this id, but the tokenizer has no token
            return b""
        if token_id in self.byte_ids:
            return bytes.fromhex(token[3:5])
        if self._byte_of_char is not None:
            try:
                return bytes(self._byte_of_char[char] for char in token)
            except KeyError:  # only added tokens have characters outside the byte-level alphabet
                return bytes(token.encode())
        before = self._decode(self._before)
        return self._decode([*self._before, token_id])[len(before) :].encode()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the names of a decoder and of the decoders that it consists of."""
    if decoder is None:
        return set()
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", [])
    return {described["type"], *(part["type"] for part in parts)}


def byte_of_char() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    A printable character of Latin-1 stands for the byte that equals the character's code.
    Characters from U+0100 on stand for the remaining bytes, in order (GPT-2, ``bytes_to_unicode``).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
