"""Request bodies of the OpenAI API: fields, limits of fields, and features that are refused.

``SamplingParams`` defines the ranges of sampling parameters. ``user``, ``metadata``, ``store``,
``service_tier``, ``prompt_cache_key``, ``safety_identifier`` and ``priority`` are accepted and have
no effect.

The items of a field of type ``Raw`` are counted before they are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    StructuredOutputs,
    check_truncation,
    truncated,
)
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode, is_empty
from dist_aclgraph.serve.openai.chat_message import ChatMessage, messages_for_template
from dist_aclgraph.serve.openai.conversation import Conversation
from dist_aclgraph.serve.openai.counted import (
    check_num_strings,
    decode_ids,
    decode_prompts,
    decode_strings,
)
from dist_aclgraph.serve.openai.kv_transfer import Transfer, read_transfer
from dist_aclgraph.serve.openai.sampling_fields import (
    BUDGETS,
    first_given,
    make_params,
    without_none,
)
from dist_aclgraph.serve.openai.schemas import MAX_PROMPTS
from dist_aclgraph.serve.openai.structured import (
    ResponseFormat,
    Structured,
    field_of_form,
    read_structured,
)
from dist_aclgraph.serve.openai.template_fields import (
    AskedReasoning,
    ReasoningSwitch,
    ThinkingSwitch,
    asked_reasoning,
    make_chat_options,
)
from dist_aclgraph.serve.openai.tools import Tool, read_tools
from dist_aclgraph.text.chat_template import ChatOptions

MAX_CHOICES = 16
MAX_CACHE_SALT_CHARS = 256
MAX_STOP_BYTES = 16 << 10
MAX_PROMPT = 1 << 17  # maximum number of tokens of a prompt before it is truncated
PROMPT_LOGPROBS = "prompt_logprobs"


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerateRequest(Body, kw_only=True):
    """The fields that chat and text completions share.

    ``max_new_tokens``, ``n_predict``, ``repeat_penalty`` and ``random_seed`` are the names in other
    servers' APIs.
    """

    PARTS: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[Raw, schemas.STOP] = ABSENT
    stop_token_ids: Annotated[Raw, schemas.STOP_TOKEN_IDS] = ABSENT
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: Annotated[Raw, schemas.STREAM_OPTIONS] = ABSENT
    user: str | None = None
    metadata: Annotated[Raw, schemas.IGNORED] = ABSENT
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    cache_salt: str | None = None
    logit_bias: Annotated[Raw, schemas.LOGIT_BIAS] = ABSENT
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    repeat_penalty: float | None = None
    random_seed: int | None = None
    allowed_token_ids: Annotated[Raw, schemas.ALLOWED_IDS] = ABSENT
    bad_words: Annotated[Raw, schemas.BAD_WORDS] = ABSENT
    response_format: Annotated[Raw, schemas.RESPONSE_FORMAT] = ABSENT
    structured_outputs: Annotated[Raw, schemas.STRUCTURED_OUTPUTS] = ABSENT
    guided_json: Annotated[Raw, schemas.ANYTHING] = ABSENT
    guided_regex: str | None = None
    guided_choice: Annotated[Raw, schemas.TEXTS] = ABSENT
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Annotated[Raw, schemas.ANYTHING] = ABSENT
    regex: str | None = None
    ebnf: str | None = None
    thinking_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    kv_transfer_params: Annotated[Raw, schemas.KV_TRANSFER] = ABSENT

    def check_fields(self) -> None:
        self.transfer()
        if len(self.cache_salt or "") > MAX_CACHE_SALT_CHARS:
            raise InvalidParameterError(
                f"cache_salt has {len(self.cache_salt or '')} characters; at most "
                f"{MAX_CACHE_SALT_CHARS} are allowed",
                "cache_salt",
            )
        if not is_empty(self.stream_options, b"{}") and not self.stream:
            raise InvalidParameterError("stream_options needs stream to be true", "stream_options")
        if self.streaming().include_obfuscation:
            raise InvalidParameterError(
                "stream_options.include_obfuscation is not offered", "stream_options"
            )
        check_truncation(self.truncate_prompt_tokens)

    def transfer(self, num_prompts: int = 1) -> Transfer:
        """Return the part of this request's work that a router has given to this service; see
        ``read_transfer``.
        """
        is_whole = not self.stream and num_prompts * self.num_choices == 1
        return read_transfer(self.kv_transfer_params, is_whole=is_whole)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def is_unlimited(self) -> bool:
        """Return whether the answer may have as many tokens as the context allows."""
        return bool(getattr(self, self._name_of_max_tokens) == -1)

    @property
    def asked_max_tokens(self) -> int | None:
        return None if self.is_unlimited else getattr(self, self._name_of_max_tokens)

    @property
    def _name_of_max_tokens(self) -> str:
        return first_given(self, "max_tokens", "max_new_tokens", "n_predict")

    @property
    def name_of_budget(self) -> str:
        """The field that limits the reasoning."""
        return first_given(self, *BUDGETS)

    @property
    def _budget(self) -> int | None:
        found: int | None = getattr(self, self.name_of_budget)
        return found

    def structured(self) -> StructuredOutputs | None:
        """Return the output format that the request demands; None if any text is allowed.

        Raises:
            InvalidParameterError: several fields demand an output format, or a format is wrong.
        """
        return read_structured(
            self,
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_choice": self.guided_choice,
                "json_schema": self.json_schema,
            },
            {
                "guided_regex": self.guided_regex,
                "guided_grammar": self.guided_grammar,
                "regex": self.regex,
                "ebnf": self.ebnf,
            },
            self.guided_whitespace_pattern,
        )

    def truncated(self, ids: list[int], context_len: int) -> list[int]:
        """Return the last ``truncate_prompt_tokens`` ids of a prompt."""
        return truncated(ids, self.truncate_prompt_tokens, context_len, self.asked_max_tokens)

    def most_prompt_tokens(self, context_len: int) -> int:
        """Return the maximum number of tokens of a prompt before its truncation."""
        return context_len if self.truncate_prompt_tokens is None else max(context_len, MAX_PROMPT)

    @property
    def asked_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def streaming(self) -> StreamOptions:
        """Return the options of a stream; the defaults if there are none."""
        if is_empty(self.stream_options, b"{}"):
            return StreamOptions()
        kind = self.kind_of_part(StreamOptions)
        options: StreamOptions = decode(self.stream_options, kind, "stream_options")
        return options

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        repetition = first_given(self, "repetition_penalty", "repeat_penalty")
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": getattr(self, repetition),
            "seed": getattr(self, first_given(self, "seed", "random_seed")),
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "prompt_logprobs": self.asked_prompt_logprobs,
            "structured_outputs": self.structured(),
            "thinking_tokens": self._budget,
        }
        kept = dict(defaults) | without_none(given)
        if self.stop:
            strings = decode_strings(self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES, "stop")
            kept["stop"] = tuple(strings)
        if not is_empty(self.logit_bias, b"{}"):
            # Each bias has a token id, which is a string, and a value, which may be a string.
            check_num_strings(bytes(self.logit_bias), 2 * MAX_BIASES, "logit_bias")
            biases = decode(self.logit_bias, dict[int, float], "logit_bias")
            kept["logit_bias"] = tuple(biases.items())
        if not is_empty(self.allowed_token_ids, b"[]"):
            ids = decode_ids(self.allowed_token_ids, MAX_ALLOWED_IDS, "allowed_token_ids")
            kept["allowed_token_ids"] = tuple(ids)
        if not is_empty(self.bad_words, b"[]"):
            words = decode_strings(self.bad_words, MAX_BAD_WORDS, MAX_STOP_BYTES, "bad_words")
            kept["bad_words"] = tuple(words)
        if self.stop_token_ids:
            ids = decode_ids(self.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids")
            kept["stop_token_ids"] = tuple(ids)
        names = {
            "max_tokens": self._name_of_max_tokens,
            "repetition_penalty": repetition,
            "thinking_tokens": self.name_of_budget,
        }
        return make_params({**kept, "max_tokens": max_tokens, "logprobs": logprobs}, names)


class ChatRequest(GenerateRequest, kw_only=True):
    PARTS: ClassVar = {
        **GenerateRequest.PARTS,
        "messages": ChatMessage,
        "response_format": ResponseFormat,
        "reasoning": ReasoningSwitch,
        "structured_outputs": Structured,
        "thinking": ThinkingSwitch,
        "tools": Tool,
    }

    messages: Annotated[Raw, schemas.MESSAGES]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    tools: Annotated[Raw, schemas.TOOLS] = ABSENT
    tool_choice: Annotated[Raw, schemas.TOOL_CHOICE] = ABSENT
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[Raw, schemas.VARIABLES] = ABSENT
    documents: Annotated[Raw, schemas.DOCUMENTS] = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[Raw, schemas.THINKING] = ABSENT
    reasoning: Annotated[Raw, schemas.REASONING] = ABSENT

    def check_fields(self) -> None:
        super().check_fields()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameterError(
                "prompt_logprobs of a chat are not streamed; set stream to false", "prompt_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true", "top_logprobs")

    def conversation(self, defaults: Mapping[str, Any], context_len: int) -> Conversation:
        """Return the conversation that the request asks to continue.

        Args:
            defaults: values of sampling parameters that the request omits.
        """
        tools, left_out = read_tools(
            self.tools, self.tool_choice, self.parallel_tool_calls, is_strict=self.is_strict
        )
        asked = self._reasoning
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        messages, continues = messages_for_template(self, self.messages)
        return Conversation(
            messages=messages,
            params=self._sampling(self.asked_max_tokens, logprobs, defaults),
            options=self.chat_options(continues=continues),
            tools=None if tools is None or tools.mode == "none" else tools,
            num_choices=self.num_choices,
            cache_salt=self.cache_salt or "",
            is_unlimited=self.is_unlimited,
            form_param=field_of_form(self),
            ignored=left_out,
            budget_param=self.name_of_budget,
            is_budget_soft=self.name_of_budget not in BUDGETS,
            off_param=asked.effort_param if asked.effort == "none" else "",
            most_prompt_tokens=self.most_prompt_tokens(context_len),
            truncated=partial(self.truncated, context_len=context_len),
            transfer=self.transfer(),
        )

    def chat_options(self, *, continues: bool = False) -> ChatOptions:
        """Return the options for making a prompt from the messages, without tools.

        Args:
            continues: whether the last message has a field that requests its continuation.
        """
        return make_chat_options(self, self._reasoning, continues=continues)

    @property
    def _reasoning(self) -> AskedReasoning:
        return asked_reasoning(self)

    @property
    def name_of_budget(self) -> str:
        """The field that limits the reasoning; fields of other APIs have the lowest priority."""
        own = first_given(self, *BUDGETS)
        asked = self._reasoning
        return own if getattr(self, own) is not None or asked.budget is None else asked.budget_param

    @property
    def _budget(self) -> int | None:
        name = self.name_of_budget
        found: int | None = getattr(self, name) if name in BUDGETS else self._reasoning.budget
        return found

    @property
    def _name_of_max_tokens(self) -> str:
        return first_given(
            self, "max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict"
        )


class CompletionRequest(GenerateRequest, kw_only=True):
    prompt: Annotated[Raw, schemas.PROMPT]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check_fields(self) -> None:
        super().check_fields()
        others = {"echo": self.echo, "truncate_prompt_tokens": self.truncate_prompt_tokens}
        for name, value in others.items():
            if self.suffix and value:
                raise InvalidParameterError(
                    f"suffix cannot be combined with {name}; leave {name} out", "suffix"
                )
        if self.best_of not in (None, 1, self.num_choices):
            raise InvalidParameterError(
                f"best_of is {self.best_of}; only the value of n is offered", "best_of"
            )

    @property
    def asked_prompt_logprobs(self) -> int | None:
        found: int | None = getattr(self, self.name_of_prompt_logprobs)
        return found

    @property
    def name_of_prompt_logprobs(self) -> str:
        """The field that asks for log-probabilities of the prompt."""
        is_asked_by_echo = self.echo and self.logprobs is not None
        return "logprobs" if is_asked_by_echo and self.prompt_logprobs is None else PROMPT_LOGPROBS

    def prompts(self, context_len: int) -> list[str] | list[list[int]]:
        """Return a list with one entry per prompt.

        With ``suffix``, there must be exactly one prompt, which must be a text. Several prompts are
        not allowed, because each prompt would contain the whole suffix. The prompt may be empty;
        the model then generates the text before the suffix.

        Raises:
            InvalidParameterError: there is no prompt, a prompt is empty, or there are too many
                prompts.
            RequestTooLongError: there are more token ids than the context allows.
        """
        found = decode_prompts(self.prompt, MAX_PROMPTS, self.most_prompt_tokens(context_len))
        if self.suffix:
            if len(found) != 1 or not isinstance(found[0], str):
                raise InvalidParameterError("with suffix, prompt must be one text", "prompt")
            return found
        if len(found) * self.num_choices > MAX_PROMPTS:
            raise InvalidParameterError(
                f"prompts times n exceed {MAX_PROMPTS} completions in one request", "prompt"
            )
        if not found or not all(found):
            raise InvalidParameterError("prompt must not be empty", "prompt")
        return found

    def sampling(self, max_tokens: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; ``defaults`` contains values for omitted fields."""
        return self._sampling(max_tokens, self.logprobs, defaults)


class TokenizeRequest(Body):
    PARTS: ClassVar = {
        "messages": ChatMessage,
        "reasoning": ReasoningSwitch,
        "thinking": ThinkingSwitch,
        "tools": Tool,
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Raw, schemas.MESSAGES] = ABSENT
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: Annotated[Raw, schemas.TOOLS] = ABSENT
    chat_template: str | None = None
    chat_template_kwargs: Annotated[Raw, schemas.VARIABLES] = ABSENT
    documents: Annotated[Raw, schemas.DOCUMENTS] = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[Raw, schemas.THINKING] = ABSENT
    reasoning: Annotated[Raw, schemas.REASONING] = ABSENT

    def check_fields(self) -> None:
        if (self.prompt is None) == is_empty(self.messages, b"[]"):
            raise InvalidParameterError("give either prompt or messages", "prompt")

    def chat(self) -> tuple[list[dict[str, Any]], ChatOptions] | None:
        """Return the messages in the form that chat templates need, and the options for making a
        prompt from them. Return None if the request has a prompt.
        """
        if is_empty(self.messages, b"[]"):
            return None
        messages, continues = messages_for_template(self, self.messages)
        return messages, self.chat_options(continues=continues)

    def chat_options(self, *, continues: bool = False) -> ChatOptions:
        """Return the options for making a prompt from the messages, with the definitions of the
        tools.
        """
        tools, _ = read_tools(self.tools, Raw(), None, is_strict=self.is_strict)
        options = make_chat_options(self, asked_reasoning(self), continues=continues)
        return replace(options, tools=None if tools is None else tools.definitions)


class DetokenizeRequest(Body, kw_only=True):
    model: str | None = None
    tokens: Annotated[Raw, schemas.TOKEN_IDS]

    def check_fields(self) -> None:
        if bytes(self.tokens) == b"null":
            raise InvalidParameterError("tokens must be an array of token ids", "tokens")
