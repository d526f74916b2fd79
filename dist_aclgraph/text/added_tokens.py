"""Reads tokens that other files of a checkpoint add to its tokenizer.json, as ``transformers`` 5
does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.json_files import read_json_object

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that a checkpoint adds to the vocabulary of its tokenizer.json.

    Attributes:
        by_name: special tokens by the names that chat templates use, such as ``bos_token``.
        described: tokens with their flags, in the order of their ids.
        special: tokens that are special, even if the tokenizer.json does not flag them as special.
    """

    by_name: dict[str, str]
    described: list[AddedToken]
    special: list[AddedToken]

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the tokens. A new token gets the next free id. A token that the tokenizer already has
        keeps its id, but gets the new flags.
        """
        tokenizer.add_tokens(self.described)
        tokenizer.add_special_tokens(self.special)


def read_added_tokens(
    directory: Path, described: Mapping[str, Any], known: Collection[AddedToken]
) -> AddedTokens:
    """Return the tokens that a checkpoint adds.

    If tokenizer_config.json has ``added_tokens_decoder``, this list is complete. Older checkpoints
    have special_tokens_map.json and added_tokens.json instead.

    Args:
        described: the content of the checkpoint's tokenizer_config.json.
        known: the added tokens that tokenizer.json lists. In older checkpoints, special tokens have
            the flags of this list.

    Raises:
        ModelError: a file cannot be read, or an entry of the file is not a valid token.
    """
    found = dict(described)
    listed = tokens_by_id(found)
    is_complete = "added_tokens_decoder" in found
    if not is_complete:
        found |= _read(directory / "special_tokens_map.json")
    flagged = {token.content: token for token in (listed.values() if is_complete else known)}
    extra = found.get("extra_special_tokens") or found.get("additional_special_tokens") or []
    values = {name: value for name, value in found.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        values |= extra
    named = {
        name: _token(value, is_special=True)
        for name, value in values.items()
        if isinstance(value, str | dict)
    }
    special = [flagged.get(token.content, token) for token in named.values()]
    if isinstance(extra, list):  # this list does not change the flags of known tokens
        there = {token.content for token in (*known, *listed.values())}
        more = [_token(value, is_special=True) for value in extra]
        special += [token for token in more if token.content not in there]
    if not is_complete:
        names = {token.content for token in special}
        for text, token_id in _read(directory / "added_tokens.json").items():
            if not isinstance(token_id, int):
                raise ModelError(f"added_tokens.json: the id of {text!r} is {token_id!r:.80}")
            flags = {"special": text in names, "normalized": text not in names}
            listed[token_id] = AddedToken(text, **flags)
    return AddedTokens(
        by_name={name: token.content for name, token in named.items()},
        described=[listed[token_id] for token_id in sorted(listed)],
        special=special,
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def tokens_by_id(described: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens that a tokenizer_config.json lists by their ids.

    Raises:
        ModelError: an entry is not a valid token.
    """
    listed = described.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise ModelError("added_tokens_decoder must be an object of tokens by their ids")
    return {int(key): _token(value) for key, value in listed.items()}


def _token(value: Any, *, is_special: bool = False) -> AddedToken:
    """Return the token that a file describes by a text, or by an object with flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelError(f"an added token is {value!r:.80}; it must be a text or have a content")
    flags = {name: bool(value[name]) for name in FLAGS if name in value}
    if is_special:
        flags["special"] = True
    return AddedToken(value["content"], **flags)
