"""Tokenizer: a checkpoint's ``tokenizer.json`` and chat template, without transformers.

The template is the model's own and runs in Jinja's immutable sandbox; nobody else's ever does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from dist_aclgraph.errors import ConfigError, InvalidParameterError, RequestTooLongError

MAX_RENDERED_CHARS = 4 << 20
MAX_CHARS_PER_TOKEN = 64  # longer texts, per token of the context, are refused unread


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
            ConfigError: a file is missing or cannot be read.
        """
        directory = Path(directory)
        config = _read_json(directory / "config.json")
        tokenizer_config = _read_json(directory / "tokenizer_config.json", optional=True)
        generation = _read_json(directory / "generation_config.json", optional=True)
        path = directory / "tokenizer.json"
        self.has_text = path.is_file()
        try:
            if self.has_text:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            else:
                self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        except Exception as e:  # tokenizers raises the base class itself
            raise ConfigError(f"{path} is not a tokenizer: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = int(config.get("vocab_size", self._tokenizer.get_vocab_size()))
        self.context_len = int(config.get("max_position_embeddings", 2048))
        self.eos_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        self._special = _special_tokens(tokenizer_config)
        self._template = _compile_template(directory, tokenizer_config)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text.

        Lets other threads run meanwhile, which ``Tokenizer.encode`` of the library does not.

        Args:
            max_tokens: most tokens that the text may have; by default as many as characters.

        Raises:
            InvalidParameterError: the tokenizer cannot take the text.
            RequestTooLongError: it has more tokens.
        """
        if not self.has_text:
            raise InvalidParameterError(
                "this checkpoint has no tokenizer.json: give the prompt as token ids", "prompt"
            )
        most = max_tokens or self.context_len
        if len(text) > most * MAX_CHARS_PER_TOKEN:
            raise self._too_long(f"{len(text)} characters", most)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidParameterError("the text holds an unpaired surrogate") from None
        try:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as e:
            raise _translate(e, "tokenize") from e
        if max_tokens is not None and len(encoding) > max_tokens:
            raise self._too_long(f"{len(encoding)} tokens", max_tokens)
        return list(encoding.ids)

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
            raise _translate(e, "decode") from e

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidParameterError(
                    f"{param} holds {token_id}; token ids lie in [0, {self.vocab_size})", param
                )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt that the model's chat template makes of the messages.

        Raises:
            InvalidParameterError: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidParameterError("this model has no chat template; use /v1/completions")
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                **self._special,
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidParameterError(
                        f"the rendered messages exceed {MAX_RENDERED_CHARS} characters", "messages"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as e:
            raise InvalidParameterError(
                f"the chat template refuses the messages: {e}", "messages"
            ) from e
        except (TypeError, ValueError, RecursionError, OverflowError) as e:
            raise InvalidParameterError(
                "the chat template cannot render the messages", "messages"
            ) from e
        return "".join(pieces)

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


def _translate(error: BaseException, verb: str) -> BaseException:
    """The Rust side panics with a BaseException of its own; everything else passes unchanged."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return InvalidParameterError(f"the tokenizer cannot {verb} this input")
    return error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that templates name; older files wrap each in an object."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _compile_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the chat's
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, indent=options.get("indent")
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as e:
        raise ConfigError(f"the chat template in {directory} does not compile: {e}") from e


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
