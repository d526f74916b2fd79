"""Detokenizer: text that grows token by token, never with half a character at its end."""

from __future__ import annotations

from collections.abc import Iterable

from dist_aclgraph.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8  # more than one UTF-8 character needs; then the bytes are invalid for good


class Detokenizer:
    """One request's text. Owns the few last ids whose text may still change.

    Each call decodes a window of recent ids only, so that the cost per token does not grow with
    the output. ``text(a) + text(b)`` may differ from ``text(a + b)`` at a seam: the window begins
    at ids already emitted, and what is new is what their longer text has more.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # ids from the last seam on
        self._num_emitted = 0  # ids of the window whose text is out
        self._emitted = ""  # text of those ids

    def feed(self, ids: Iterable[int]) -> str:
        """Take new ids and return the text that is now certain; it may be empty."""
        return "".join(self._feed_one(token_id) for token_id in ids)

    def finish(self) -> str:
        """Return what was held back; nothing may be fed afterwards."""
        rest = self._decode(self._window)[len(self._emitted) :]
        self._window, self._num_emitted, self._emitted = [], 0, ""
        return rest

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._num_emitted
        if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""  # an incomplete character: more bytes may follow
        new = text[len(self._emitted) :]
        # The ids just emitted stay as the left context of the next one.
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted = self._decode(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
