"""Detokenizer: converts token ids to text, token by token. Returned text never changes later."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import partial

from dist_aclgraph.text.tokenizer import Tokenizer

# up to four tokens form one character, because a UTF-8 character can have four bytes
CONTEXT_TOKENS = 4
MAX_WINDOW = 10
REPLACEMENT = "\ufffd"
_BLANKS = re.compile(r"\s+")


class Detokenizer:
    """The text of one output: prompt and output are decoded together, and the text of the prompt is
    removed.

    The text of a token depends on the tokens before it: a decoder drops the first space of a text,
    and joins bytes to characters. So the last tokens are decoded again with each new token, from a
    window that begins in the prompt. Text that a later token may still change is held back. Such
    text is a replacement character at the end, a space that the tokenizer may remove before
    punctuation, or a run of byte tokens. One wrong byte turns a whole run into replacement
    characters.

    ``take_token_texts`` divides the text among its tokens, for log-probabilities.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = tokenizer.token_bytes.byte_ids
        self._decode = partial(tokenizer.text_of, skip_special_tokens=skip_special_tokens)
        self._without = tokenizer.unspoken_ids if skip_special_tokens else tokenizer.nameless_ids
        self._window = self._context(prompt_ids)
        before = self._decode(self._window)
        # If the prompt ends with an incomplete character, the output may complete this character.
        # If not, the replacement character belongs to the prompt.
        self._is_open = before.endswith(REPLACEMENT)
        # Number of characters at the beginning of the window's text that were already returned, or
        # that belong to the prompt.
        self._num_shown = len(before) - self._is_open
        self._held: list[int] = []  # tokens whose texts are not certain yet
        self._new = ""  # returned text that is not yet divided among tokens
        self._token_texts: list[str] = []

    def feed(self, token_id: int) -> str:
        """Add a token; return the new text that no later token changes. The text can be empty."""
        self._held.append(token_id)
        if token_id in self._without:
            if len(self._held) == 1:
                self._divide()
            return ""
        # A token of whole characters needs no decoding if no text before it is held back.
        if len(self._held) == 1 and (text := self._tokenizer.whole_text(token_id)):
            self._window, self._num_shown, self._is_open = [token_id], len(text), False
            self._held.clear()
            self._token_texts.append(text)
            return text
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        whole = self._decode(self._window)
        certain = self._tokenizer.certain_text(whole)
        new = self._without_prompt(certain[self._num_shown :])
        self._num_shown = max(self._num_shown, len(certain))
        if len(self._window) > MAX_WINDOW:
            self._window = self._context(self._window)
            self._num_shown = self._num_certain()
        self._new += new
        if len(certain) == len(whole):
            self._divide()
        return new

    def finish(self) -> str:
        """Return the text that was held back. No token may be added after this call."""
        rest = self._decode(self._window)[self._num_shown :] if self._held else ""
        new = self._without_prompt(rest)
        self._new += new
        self._divide()
        return new

    def take_token_texts(self) -> list[str]:
        """Return one text for each token whose text has become certain since the last call, in the
        order of the tokens.
        """
        texts, self._token_texts = self._token_texts, []
        return texts

    def _without_prompt(self, text: str) -> str:
        """Return new text without a replacement character that belongs to the prompt."""
        if self._is_open and text:
            self._is_open = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _context(self, ids: Sequence[int]) -> list[int]:
        """Return the last tokens, on which the text of the next tokens depends.

        The first returned token is outside any run of byte tokens. The result omits tokens without
        a text.
        """
        context: list[int] = []
        for token_id in reversed(ids):
            if token_id not in self._without:
                context.append(token_id)
                if len(context) >= CONTEXT_TOKENS and token_id not in self._byte_ids:
                    break
        return context[::-1]

    def _num_certain(self) -> int:
        return len(self._tokenizer.certain_text(self._decode(self._window)))

    def _divide(self) -> None:
        """Divide new text among its tokens. If several tokens form one character, the last of these
        tokens gets the character.
        """
        ids, self._held = self._held, []
        text, self._new = self._new, ""
        if len(ids) < 2:
            self._token_texts += [text] * len(ids)
            return
        read = codecs.getincrementaldecoder("utf-8")("replace").decode
        known = self._tokenizer.token_bytes
        pieces = [read(b"" if i in self._without else known[i]) for i in ids]
        if "".join(pieces) != text:
            # The bytes are not UTF-8. In a run of byte tokens, each token then has one replacement
            # character in the text.
            last = len(ids) - 1
            is_run = not text[:last].strip(REPLACEMENT)
            pieces = [text[i : i + 1] if is_run else "" for i in range(last)]
            pieces.append(text[last:] if is_run else text)
        self._token_texts += pieces


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], given: str | None) -> list[str]:
    """Return the text of each token of a prompt.

    The joined texts equal ``given``, the text from which the tokens were made. There are two
    exceptions: ``given`` is None, or the tokenizer has changed the text. Special tokens then have
    no text.
    """
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids:
        detokenizer.feed(token_id)
    detokenizer.finish()
    texts = detokenizer.take_token_texts()
    if given is None:
        return texts
    shown: list[str] = []
    at = 0
    for token_id, text in zip(ids, texts, strict=True):
        is_special = token_id in tokenizer.special_ids
        own = tokenizer.own_text(token_id) if is_special else text
        blanks = _blanks_before(own, given, at)
        if is_special and not given.startswith(own, at + len(blanks)):
            own = blanks = ""  # the tokenizer has added this token, for example a begin token
        at += len(blanks) + len(own)
        if shown:
            shown[-1] += blanks
        shown.append(own if shown else blanks + own)
    if shown and given[at:].isspace():
        shown[-1] += given[at:]
    return shown if "".join(shown) == given else texts


def _blanks_before(text: str, given: str, at: int) -> str:
    """Return the white space of a prompt between a position and the text of the next token. If a
    special token is at this position, the tokenizer may have removed the white space.
    """
    if given.startswith(text, at):
        return ""
    count = _num_blanks(given, at) - _num_blanks(text)
    is_next = count > 0 and given.startswith(text, at + count)
    return given[at : at + count] if is_next else ""


def _num_blanks(text: str, begin: int = 0) -> int:
    found = _BLANKS.match(text, begin)
    return len(found[0]) if found else 0
