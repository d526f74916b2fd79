"""Detokenizer: text that grows token by token, never with half a character at its end."""

from __future__ import annotations

from collections.abc import Iterable

from dist_aclgraph.text.tokenizer import Tokenizer

MAX_HELD_TOKENS = 8  # more than one UTF-8 character needs; then the bytes are invalid for good


class Detokenizer:
    """One request's text, by the library's ``DecodeStream``.

    The stream holds bytes back until they are a character. It would do so forever with bytes that
    never become one: they come out as replacement characters, after a few tokens or at the end.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = tokenizer.decode_stream(skip_special_tokens=skip_special_tokens)
        self._before: list[int] = []  # ids of the last text that came out
        self._held: list[int] = []  # ids whose text has not come out

    def feed(self, ids: Iterable[int]) -> str:
        """Take new ids and return the text that is now certain; it may be empty."""
        return "".join(self.feed_one(token_id) for token_id in ids)

    def finish(self) -> str:
        """Return what was held back; nothing may be fed afterwards."""
        # With what stands before it: some decoders drop a space at the beginning.
        before = self._decode(self._before)
        text = self._decode(self._before + self._held)[len(before) :]
        self._before, self._held = [], []
        return text

    def feed_one(self, token_id: int) -> str:
        """Take a new id and return the text that is now certain; it may be empty."""
        self._held.append(token_id)
        text = self._stream(token_id)
        if text is not None:
            self._before, self._held = self._held, []
            return text
        if len(self._held) < MAX_HELD_TOKENS:
            return ""
        text = self.finish()
        self._stream = self._tokenizer.decode_stream(skip_special_tokens=self._skip)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
