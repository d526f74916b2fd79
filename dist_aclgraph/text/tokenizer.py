"""Tokenizer: a checkpoint's ``tokenizer.json`` and chat template, without transformers.

Only the model's own template is ever rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dist_aclgraph.errors import (
    DistAclGraphError,
    InvalidParameterError,
    ModelError,
    RequestTooLongError,
)
from dist_aclgraph.shapes.json_files import check_regular, read_json_object
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.text.chat_template import read_chat_template
from dist_aclgraph.token_ids import check_token_ids

MIN_LONGEST_TOKEN = 64  # characters; normalisers may drop some of a text
# The library holds Python's lock while it gives an encoding back or frees it: some 5 ms for one of
# so many characters.
PART_CHARS = 1 << 16


class Tokenizer:
    """Text to ids and back. Owns no state of requests; safe to share between threads.

    Attributes:
        eos_ids: ids that end an output, from generation_config.json, else config.json.
        vocab_size: ids lie in [0, vocab_size).
        context_len: the model's max_position_embeddings.
        has_text: whether there is a tokenizer.json; without one, prompts are token ids and
            outputs have no text.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read a checkpoint directory.

        Raises:
            ConfigError: there is no such directory.
            ModelError: a file is missing or cannot be read.
        """
        directory = Path(directory)
        config = read_model_config(directory)
        described = directory / "tokenizer_config.json"
        tokenizer_config = read_json_object(described) if described.exists() else {}
        path = directory / "tokenizer.json"
        self.has_text = path.exists()
        if self.has_text:
            check_regular(path)
        try:
            if self.has_text:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            else:
                self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        except BaseException as e:  # tokenizers raises the base class itself, and panics
            raise _translate(e, ModelError(f"{path} is not a tokenizer: {e}")) from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        longest = max(map(len, vocabulary), default=0)
        self._longest_token = max(MIN_LONGEST_TOKEN, longest)
        self.vocab_size = config.integer("vocab_size", self._tokenizer.get_vocab_size())
        # Many tokenizers have added tokens for which the model has no row.
        self._knows_more = max(vocabulary.values(), default=0) >= self.vocab_size
        self.context_len = config.max_position_embeddings
        self.eos_ids = config.eos_token_ids
        self._template = read_chat_template(directory, tokenizer_config)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text.

        Lets other threads run meanwhile, which ``Tokenizer.encode`` of the library does not.

        Args:
            max_tokens: most tokens that the text may have; by default as many as characters.

        Raises:
            InvalidParameterError: the tokenizer cannot take the text, or it holds a token that the
                model does not have.
            RequestTooLongError: it has more tokens.
        """
        if not self.has_text:
            raise InvalidParameterError(
                "this checkpoint has no tokenizer.json: give the prompt as token ids", "prompt"
            )
        most = max_tokens or self.context_len
        if len(text) > most * self._longest_token:
            raise self._too_long(f"{len(text)} characters", most)
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidParameterError("the text holds an unpaired surrogate") from None
        if max_tokens is not None and len(text) > PART_CHARS and num_bytes > max_tokens:
            self._check_parts(text, max_tokens)
        encoding = self._encode(text, add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise self._too_long(f"{len(encoding)} tokens", max_tokens)
        ids: list[int] = encoding.ids
        if self._knows_more:
            self._check_text(ids)
        return ids

    def _check_text(self, ids: Sequence[int]) -> None:
        """Refuse a text that holds a token of the tokenizer for which the model has no row."""
        highest = max(ids, default=0)
        if highest >= self.vocab_size:
            token = self._tokenizer.id_to_token(highest)
            raise InvalidParameterError(
                f"the text holds {token!r}, which is token {highest}; this model's token ids lie "
                f"in [0, {self.vocab_size})",
                "prompt",
            )

    def _check_parts(self, text: str, max_tokens: int) -> None:
        """Refuse a long text by its beginning, without an encoding of all its tokens.

        A cut may split a token into as many tokens as it has characters.
        """
        count = 0
        for start in range(0, len(text), PART_CHARS):
            part = self._encode(text[start : start + PART_CHARS], False)
            count += max(0, len(part) - self._longest_token)
            if count > max_tokens:
                raise self._too_long(f"more than {count} tokens", max_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        try:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as e:
            raise _translate(e, _cannot("tokenize")) from e
        return encoding

    def _too_long(self, found: str, most: int) -> RequestTooLongError:
        # Clients look for the first words.
        return RequestTooLongError(
            f"This model's maximum context length is {min(most, self.context_len)} tokens; the "
            f"text has {found}, and at most {most} tokens are taken",
            "prompt",
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Raises:
            InvalidParameterError: an id lies outside the vocabulary.
        """
        self.check_ids(ids, "tokens")
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as e:
            raise _translate(e, _cannot("decode")) from e

    def decode_stream(self, *, skip_special_tokens: bool) -> Callable[[int], str | None]:
        """Return a function that takes the ids of one text in order.

        It returns the text that an id completes, or None where no character is complete.
        """
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)

        def step(token_id: int) -> str | None:
            if not 0 <= token_id < self.vocab_size:
                self.check_ids((token_id,), "tokens")
            try:
                text: str | None = stream.step(self._tokenizer, token_id)
            except BaseException as e:
                raise _translate(e, _cannot("decode")) from e
            return text

        return step

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Return if the model has all of these tokens.

        Raises:
            InvalidParameterError: a token is missing.
        """
        check_token_ids(ids, self.vocab_size, param)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        Raises:
            InvalidParameterError: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidParameterError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of the rendered messages; the template brings its own special tokens."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def _translate(error: BaseException, ours: DistAclGraphError) -> BaseException:
    """Return our error for a panic of the Rust library; pass all other errors on unchanged."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ours
    return error


def _cannot(verb: str) -> InvalidParameterError:
    return InvalidParameterError(f"the tokenizer cannot {verb} this input")
