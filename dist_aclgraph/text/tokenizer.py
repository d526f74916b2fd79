"""Tokenizer: a checkpoint's own tokenizer and chat template, without transformers.

The tokenizer renders only the templates of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dist_aclgraph.arrays.token_ids import check_token_ids
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    DistAclGraphError,
    InvalidParameterError,
    ModelError,
    RequestTooLongError,
)
from dist_aclgraph.shapes.json_files import (
    POINTER,
    check_no_pointer,
    check_regular,
    read_json_object,
)
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.rope_spec import read_context_lengths
from dist_aclgraph.text.added_tokens import read_added_tokens, tokens_by_id
from dist_aclgraph.text.chat_template import DEFAULT, ChatOptions, read_chat_template
from dist_aclgraph.text.tiktoken_file import read_tiktoken
from dist_aclgraph.text.token_bytes import TokenBytes

# The files that can contain a tokenizer; the first file that exists is used.
FILES = JSON, TIKTOKEN, SENTENCEPIECE = "tokenizer.json", "tiktoken.model", "tokenizer.model"
# Lower limit for the assumed length of the longest token, in characters. A normaliser may shorten a
# text, so a token can stand for more characters than its own text has.
MIN_LONGEST_TOKEN = 64
# A long text is encoded in parts of this length. The library holds the GIL while it returns or
# frees an encoding; for one part, this takes about 5 ms.
PART_CHARS = 1 << 16
# Matches the end of a text that ``_without_spaces`` may change after more text was added.
_UNCERTAIN_END = re.compile(r" [ 'nmsvert]*$")


class Tokenizer:
    """Turns text into token ids and back.

    Threads may share a tokenizer, because a tokenizer stores nothing about requests.

    Attributes:
        eos_ids: ids that end an output: the tokenizer's own stop token, and the ids of
            generation_config.json and of config.json.
        special_ids: ids of tokens that are not shown to users, such as the stop token.
        nameless_ids: ids for which the model has a row, but the tokenizer has no token.
        unspoken_ids: ``special_ids`` and ``nameless_ids`` together.
        token_bytes: the bytes that a token adds in the middle of a text.
        vocab_size: all token ids are in [0, vocab_size).
        context_len: default length of the longest request, in tokens.
        has_text: whether the checkpoint has one of ``FILES``. If false, prompts are token ids, and
            outputs have no text.
    """

    def __init__(
        self,
        directory: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        chat_template: str | None = None,
    ) -> None:
        """Read a checkpoint directory; see ``read_model_config``.

        Args:
            chat_template: a file whose template replaces the checkpoint's templates.

        Raises:
            ConfigError: there is no such directory.
            ModelError: a file is missing or cannot be read.
        """
        directory = Path(directory)
        config = read_model_config(directory, overrides)
        described = directory / "tokenizer_config.json"
        tokenizer_config = read_json_object(described) if described.exists() else {}
        found = _read_tokenizer(directory, tokenizer_config)
        self.has_text = found is not None
        self._tokenizer = found or tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = self._tokenizer.get_added_tokens_decoder().values()
        added = read_added_tokens(directory, tokenizer_config, known)
        if self.has_text:
            added.add_to(self._tokenizer)
        self._cleans_up = _cleans_up(self._tokenizer, tokenizer_config)
        vocabulary = self._tokenizer.get_vocab()
        longest = max(map(len, vocabulary), default=0)
        self._longest_token = max(MIN_LONGEST_TOKEN, longest)
        self.vocab_size = config.integer("vocab_size", self._tokenizer.get_vocab_size())
        # The tokenizer may also have added tokens for which the model has no row.
        self._knows_more = max(vocabulary.values(), default=0) >= self.vocab_size
        self.context_len = read_context_lengths(config).usual
        own_end = self._tokenizer.token_to_id(added.by_name.get("eos_token", ""))
        ends = [*config.eos_token_ids, *([] if own_end is None else [own_end])]
        self.eos_ids = tuple(dict.fromkeys(i for i in ends if i < self.vocab_size))
        listed = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in listed.items() if token.special)
        self._added_ids = {t.content: i for i, t in listed.items() if i < self.vocab_size}
        self.nameless_ids = frozenset(range(self.vocab_size)).difference(vocabulary.values())
        self.unspoken_ids = self.nameless_ids | self.special_ids
        self.token_bytes = TokenBytes(self._tokenizer, vocabulary)
        path = Path(chat_template) if chat_template else None
        self._template = read_chat_template(directory, tokenizer_config, added.by_name, path=path)

    @classmethod
    def of(cls, config: Config) -> Tokenizer:
        """Read the tokenizer of a configuration; see ``__init__``."""
        return cls(config.model, config.model_overrides, chat_template=config.chat_template)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text. Other threads can run during this call, unlike during the
        library's ``Tokenizer.encode``.

        Args:
            max_tokens: largest number of tokens that the text may have; the default is the number
                of characters.

        Raises:
            InvalidParameterError: the tokenizer cannot encode the text, or the text contains a
                token that the model does not have.
            RequestTooLongError: the text has more than ``max_tokens`` tokens.
        """
        if not self.has_text:
            raise InvalidParameterError(
                f"this checkpoint has none of the files {', '.join(FILES)}: give the prompt as "
                "token ids, or add such a file",
                "prompt",
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
        """Refuse a text that contains a token for which the model has no row."""
        highest = max(ids, default=0)
        if highest >= self.vocab_size:
            token = self._tokenizer.id_to_token(highest)
            raise InvalidParameterError(
                f"the text holds {token!r}, which is token {highest}; this model's token ids lie "
                f"in [0, {self.vocab_size})",
                "prompt",
            )

    def _check_parts(self, text: str, max_tokens: int) -> None:
        """Encode a long text part by part; refuse the text as soon as the parts have too many
        tokens.

        A cut within a token of n characters turns the token into at most n tokens. To exclude such
        additional tokens, the length of the longest token is subtracted from each part's number of
        tokens.
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
        # Clients recognise this error by the first words of its message.
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
        return self.text_of(ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids that the model has generated."""
        try:
            text = str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        except BaseException as e:
            raise _translate(e, _cannot("decode")) from e
        return _without_spaces(text) if self._cleans_up else text

    def certain_text(self, text: str) -> str:
        """Return the part of a decoded text that no later token changes.

        A replacement character at the end may stand for the first bytes of an incomplete character.
        """
        if text.endswith("\ufffd"):
            return text[:-1]
        if self._cleans_up and (end := _UNCERTAIN_END.search(text)):
            return text[: end.start()]
        return text

    def whole_text(self, token_id: int) -> str | None:
        """Return the text that a token always adds after whole characters; None if this text may
        depend on other tokens.
        """
        return None if self._cleans_up else self.token_bytes.whole_text(token_id)

    def own_text(self, token_id: int) -> str:
        """Return the text that a token adds in the middle of a text."""
        return self.token_bytes[token_id].decode(errors="replace")

    def bytes_of(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that adds ``text``; the bytes may be a part of a character.

        The result does not include the space that some tokenizers add before a text. A special
        token has no bytes.
        """
        data = self.token_bytes[token_id]
        try:
            is_shorter = data.decode().endswith(text)
        except UnicodeDecodeError:
            return data
        return text.encode() if is_shorter else data

    def as_json(self) -> str:
        """Return the tokenizer, added tokens included, as the text of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    @property
    def template_source(self) -> str | None:
        """The text of all of the checkpoint's chat templates; None if there is no template."""
        return None if self._template is None else "\n".join(self._template.sources.values())

    def token(self, text: str) -> int | None:
        """Return the id of the vocabulary's token ``text``; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def added_token(self, text: str) -> int | None:
        """Return the id of the added token whose text is ``text``; None if there is none."""
        return self._added_ids.get(text)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Check that the model has all of these tokens.

        Raises:
            InvalidParameterError: the model does not have one of the tokens.
        """
        check_token_ids(ids, self.vocab_size, param)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = DEFAULT
    ) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        Raises:
            InvalidParameterError: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidParameterError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, options)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions = DEFAULT,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of the rendered messages. The template adds all special tokens."""
        text = self.render_chat(messages, options)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt of messages as ids or as text, like a tokenizer of transformers.

        Args:
            chat_template: name of one of the checkpoint's templates.
        """
        options = ChatOptions(
            tools=tools,
            documents=documents,
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if tokenize:
            return self.encode_chat(conversation, options)
        return self.render_chat(conversation, options)


def _read_tokenizer(directory: Path, described: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """Return the tokenizer that one of ``FILES`` contains, without the tokens that other files add.
    Return None if the checkpoint has none of these files.

    Raises:
        ModelError: the file is not a tokenizer.
    """
    files = [directory / name for name in FILES]
    path = next((path for path in files if path.exists() or path.is_symlink()), None)
    if path is None:
        return None
    try:
        check_regular(path)
        with path.open("rb") as stream:
            check_no_pointer(path, stream.read(len(POINTER)))
        if path.name == JSON:
            return tokenizers.Tokenizer.from_file(str(path))
        if path.name == TIKTOKEN:
            return read_tiktoken(path, tokens_by_id(described))
        # Few checkpoints need this module, and the import of its libraries takes 50 ms.
        from dist_aclgraph.text.sentencepiece_file import read_sentencepiece

        return read_sentencepiece(path, described)
    except ModelError:
        raise
    except BaseException as e:  # the class of a panic is not derived from Exception
        raise _translate(e, ModelError(f"{path} is not a tokenizer: {e}")) from e


def _cleans_up(tokenizer: tokenizers.Tokenizer, described: Mapping[str, Any]) -> bool:
    """Return whether spaces before punctuation are removed from texts. For BPE models, two keys in
    tokenizer_config.json must request the removal.
    """
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = isinstance(tokenizer.model, tokenizers.models.BPE)
    wish = bool(described.get("clean_up_tokenization_spaces"))
    return wish and (not is_bpe or bool(described.get(forced)))


def _without_spaces(text: str) -> str:
    """Remove spaces before English punctuation and suffixes, as ``transformers`` does."""
    for end in (" .", " ?", " !", " ,"):
        text = text.replace(end, end[1])
    text = text.replace(" ' ", "'")
    for end in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(end, end[1:])
    return text


def _translate(error: BaseException, ours: DistAclGraphError) -> BaseException:
    """Return ``ours`` for an exception or a panic of the Rust library. Return other errors, such as
    KeyboardInterrupt, unchanged.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ours
    return error


def _cannot(verb: str) -> InvalidParameterError:
    return InvalidParameterError(f"the tokenizer cannot {verb} this input")
