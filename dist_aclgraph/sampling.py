"""The parameters for choosing tokens and ending a request. Only this module validates them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from json import dumps as to_json
from typing import Any

from dist_aclgraph.errors import InvalidParameterError

GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 0.01
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1 << 16
MAX_BAD_WORDS = 64
MAX_CHOICES = 16384
MAX_STRUCTURE_CHARS = 1 << 16
# JSON allows any amount of white space. This pattern limits the amount, because some models would
# write white space until they reach the maximum number of tokens.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,8}"


def check_structure_length(num_chars: int) -> None:
    """Raise an error if an output format has too many characters.

    Raises:
        InvalidParameterError: there are more than ``MAX_STRUCTURE_CHARS`` characters.
    """
    if num_chars > MAX_STRUCTURE_CHARS:
        raise InvalidParameterError(
            f"structured_outputs has {num_chars} characters; at most {MAX_STRUCTURE_CHARS} are "
            "allowed",
            "structured_outputs",
        )


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The output format that a request requires. Exactly one of the first six fields is set.

    The fields have the names of vLLM's ``StructuredOutputsParams``.

    Attributes:
        json: a JSON schema, as text or as an object; the order of an object's keys is preserved.
        regex: a regular expression that must match the whole answer.
        choice: the texts that are allowed as the whole answer.
        grammar: a grammar in the language of Lark or of GBNF ("::=").
        json_object: whether the answer must be a JSON object, without further restrictions.
        lark: a grammar of llguidance with its extensions, made from the request's tools.
        whitespace_pattern: a regular expression for white space in JSON; None allows at most eight
            blanks or newlines in a row.
        disable_any_whitespace: whether JSON must have no optional white space.
        has_free_text: whether the answer may contain text without a format, in addition to tool
            calls. If false, stop strings do not end the text, because the answer would be
            incomplete.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    lark: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    has_free_text: bool = False

    def __post_init__(self) -> None:
        forms = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.lark)
        given = [form for form in forms if form is not None and form is not False]
        if len(given) != 1:
            raise InvalidParameterError(
                f"structured_outputs has {len(given)} of json, regex, choice, grammar and "
                "json_object; it must have exactly one",
                "structured_outputs",
            )
        if self.choice is not None and not all(
            isinstance(text, str) and text for text in self.choice
        ):
            raise InvalidParameterError(
                "structured_outputs.choice must be texts that are not empty", "structured_outputs"
            )
        check_structure_length(len(self.text))

    @property
    def kind(self) -> str:
        """The language of ``text``."""
        if self.json is not None or self.json_object:
            return "json"
        names = ("regex", "choice", "grammar", "lark")
        return next(name for name in names if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The source of the grammar."""
        if self.json_object:
            return '{"type": "object"}'
        if self.json is not None:
            return self.json if isinstance(self.json, str) else to_json(self.json)
        if self.choice is not None:
            return to_json(list(dict.fromkeys(self.choice)))
        return self.regex or self.grammar or self.lark or ""

    @property
    def json_options(self) -> dict[str, Any]:
        """Options for reading a JSON schema: the value of llguidance's key ``x-guidance``."""
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace_pattern or JSON_SPACE}


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The output format of a request, compiled for the tokens of the model's vocabulary.

    Attributes:
        grammar: a grammar of llguidance; empty allows every text.
        is_slow: whether the computation of the allowed tokens can take longer than a step.
        num_bytes: memory that the compiled grammar takes.
        salt: compiled grammars are shared only between requests with the same salt.
        end_ids: tokens that end the output. If the answer has a grammar, these tokens are forbidden
            in the reasoning before the answer.
        think_begin, think_end: tokens around the reasoning; -1 if there is no reasoning. The
            grammar does not apply to the reasoning.
        is_thinking: whether the output begins within the reasoning. If false, the output's first
            token may be ``think_begin``.
        max_thought: maximum number of tokens of reasoning; -1 sets no limit.
    """

    grammar: str = ""
    is_slow: bool = False
    num_bytes: int = 0
    salt: str = ""
    end_ids: tuple[int, ...] = ()
    think_begin: int = -1
    think_end: int = -1
    is_thinking: bool = False
    max_thought: int = -1


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Parameters of one request; limits follow the OpenAI API and vLLM's extensions.

    Attributes can be changed later; `LLM` checks the new value when it uses the object.

    Attributes:
        n: number of outputs of `LLM` for the prompt; output j uses the seed ``seed + j``.
        max_tokens: maximum number of tokens to generate; None means as many as the context allows.
        temperature: [0, 2]; below 1e-5, the most probable token is chosen; values from 1e-5 to 0.01
            are raised to 0.01.
        top_k: only the k most probable tokens may be drawn; with 0 or -1, all tokens may be drawn.
        top_p: (0, 1], only the smallest set of most probable tokens with a total probability of at
            least top_p may be drawn.
        min_p: [0, 1], tokens with less than min_p times the highest probability are not drawn.
        presence_penalty, frequency_penalty: [-2, 2], subtracted from the logits of tokens that are
            in the output.
        repetition_penalty: > 0; for tokens that are in the prompt or the output, positive logits
            are divided by this number, and negative logits are multiplied by it.
        seed: the random numbers depend only on the seed and the token's position. None or -1 means
            a random seed, as in vLLM.
        logprobs: number of most probable tokens to report for each token; None reports nothing.
        prompt_logprobs: number of most probable tokens to report for each prompt token except the
            first prompt token.
        stop: strings that end the text.
        include_stop_str_in_output: whether the text contains the stop string that ended it.
        stop_token_ids: ids that end the output, in addition to the model's stop tokens.
        ignore_eos: whether generation continues after the model's stop token.
        min_tokens: the first min_tokens tokens contain no stop token. A stop string that ends
            within these tokens does not end the text.
        logit_bias: number in [-100, 100] for each token id; it is added to the token's logit.
        allowed_token_ids: the only tokens that may be generated; empty allows all tokens.
        bad_words: texts that are never generated; ``bad_word_ids`` contains their tokens.
        skip_special_tokens: whether the text omits special tokens.
        spaces_between_special_tokens: has no effect, because tokenizers that are read from
            tokenizer.json never add such spaces.
        detokenize: whether the outputs of `LLM` have a text.
        output_kind: has no effect, because `LLM` returns whole outputs only.
        truncate_prompt_tokens: `LLM` uses only the last tokens of the prompt, at most this number;
            -1 means the largest number with which prompt and output fit in the context.
        structured_outputs: the format that the answer must have.
        thinking_tokens: maximum number of tokens of reasoning. After this number, the reasoning
            ends.
        structure: the output format, made from other parameters (``text/structure.py``).
        returns_embedding: whether the answer is the hidden state after the prompt's last token,
            instead of text. ``LLM.embed`` sets this.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    thinking_tokens: int | None = None
    structure: Structure | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: object = None
    truncate_prompt_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    returns_embedding: bool = False

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self.stop = _strings("stop", self.stop)
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens is {self.min_tokens}; it must not exceed max_tokens "
                f"({self.max_tokens})",
                "min_tokens",
            )
        if self.returns_embedding and self.max_tokens != 1:
            raise InvalidParameterError(
                f"max_tokens is {self.max_tokens}; a request for an embedding needs 1", "max_tokens"
            )
        self.structured_outputs = _structured(self.structured_outputs)
        self.logit_bias = _biases(self.logit_bias)
        self.allowed_token_ids = _allowed(self.allowed_token_ids)
        self.bad_words = _words(self.bad_words)
        check_truncation(self.truncate_prompt_tokens)
        if self.thinking_tokens is not None:
            _integer("thinking_tokens", self.thinking_tokens, 0, 2**31 - 1)
        if GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def clone(self) -> SamplingParams:
        """Return a copy of these parameters, after another check of all values."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def check_truncation(value: object) -> None:
    """Check the number of tokens to which a prompt is truncated; see ``truncated``."""
    if value is not None and value != -1:
        _integer("truncate_prompt_tokens", value, 1, 2**31 - 1, or_else="-1")


def truncated(
    ids: list[int], most: int | None, context_len: int, max_tokens: int | None
) -> list[int]:
    """Return at most the last ``most`` ids of a prompt; None sets no limit.

    The value -1 stands for the number of ids that fit in the context together with the output.
    """
    if most is None:
        return ids
    if most < 0:
        most = max(1, context_len - max(1, max_tokens or 1))
    return ids[-most:]


def chosen_seed(params: SamplingParams) -> int | None:
    """Return the seed of a request; None if the service must choose the seed."""
    return None if params.seed == -1 else params.seed


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of one of several answers to a prompt, within int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _integer(name: str, value: object, low: int, high: int, *, or_else: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameterError(f"{name} is {value!r}; it must be an integer", name)
    if not low <= value <= high:
        raise InvalidParameterError(
            f"{name} is {value}; it must {or_else and f'be {or_else}, or '}lie between {low} and "
            f"{high}",
            name,
        )


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameterError(f"{name} is {value!r}; it must be a number", name)
    inside = (low < value if low_open else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        bracket = "(" if low_open else "["
        raise InvalidParameterError(
            f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g}]", name
        )


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidParameterError(
            f"{name} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", name
        )
    if not all(isinstance(s, str) and s for s in strings):
        raise InvalidParameterError(f"{name} must be non-empty strings", name)
    return strings


def _structured(value: object) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    names = {field.name for field in fields(StructuredOutputs)}
    if isinstance(value, Mapping) and value.keys() <= names:
        return StructuredOutputs(**value)
    raise InvalidParameterError(
        f"structured_outputs is {value!r:.80}; it must be StructuredOutputs, or a mapping with one "
        "of its fields, such as json or choice",
        "structured_outputs",
    )


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[Any, ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value or ())
    if len(pairs) > MAX_BIASES:
        raise InvalidParameterError(
            f"logit_bias has {len(pairs)} tokens; at most {MAX_BIASES} are allowed", "logit_bias"
        )
    for token_id, bias in pairs:
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number("logit_bias", bias, -100.0, 100.0)
    return tuple(sorted(pairs))


def _allowed(value: Sequence[int] | None) -> tuple[int, ...]:
    ids = tuple(value or ())
    if len(ids) > MAX_ALLOWED_IDS:
        raise InvalidParameterError(
            f"allowed_token_ids has {len(ids)} ids; at most {MAX_ALLOWED_IDS} are allowed",
            "allowed_token_ids",
        )
    for token_id in ids:
        _integer("allowed_token_ids", token_id, 0, 2**31 - 1)
    return ids


def _words(value: Sequence[str] | None) -> tuple[str, ...]:
    words = tuple(value or ())
    if len(words) > MAX_BAD_WORDS or not all(isinstance(w, str) and w for w in words):
        raise InvalidParameterError(
            f"bad_words must be at most {MAX_BAD_WORDS} texts that are not empty", "bad_words"
        )
    return words


def _ids(name: str, value: Sequence[int] | None) -> tuple[int, ...]:
    ids = tuple(value or ())
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameterError(
            f"{name} has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed", name
        )
    for token_id in ids:
        _integer(name, token_id, 0, 2**31 - 1)
    return ids
