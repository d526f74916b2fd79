"""Request bodies of the OpenAI API, checked by pydantic at the HTTP edge and nowhere else.

Sampling ranges live in ``SamplingParams``; here are shapes, and what is not offered. ``user``,
``metadata``, ``store``, ``service_tier`` and ``cache_salt`` are accepted and have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
Float = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Closed to unknown fields; ``read_json`` drops them first where the service is lenient."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Body):
    type: str


class TextPart(Body):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Any = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls or self.role == "tool":
            raise ValueError("tool calls are not offered")
        if self.content is None:
            raise ValueError("content is missing")
        if not isinstance(self.content, str):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise ValueError(f"content of type {part.type!r:.40} is not offered; send text")
        return self

    def for_template(self) -> dict[str, str]:
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text or "" for part in content or [])
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class _Generation(Body):
    """What chat and text completions share."""

    model: str
    max_tokens: int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    logit_bias: dict[str, Float] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _no_logit_bias(cls, value: dict[str, float] | None) -> None:
        if value:
            raise ValueError("logit_bias is not offered")

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
        }
        kept: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(max_tokens=max_tokens, stop=stop, logprobs=logprobs, **kept)


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_offered(self) -> ChatRequest:
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tools are not offered")
        if self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format other than text is not offered")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked

    def sampling(self, max_tokens: int) -> SamplingParams:
        return self._sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_offered(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not offered")
        if self.best_of not in (None, 1):
            raise ValueError("best_of is not offered")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of an echoed prompt are not offered")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt.

        Raises:
            InvalidParameterError: there is none, or one is empty, or there are too many.
        """
        given: Any = self.prompt
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        found = given if several else [given]
        if len(found) * self.num_choices > MAX_PROMPTS:
            raise InvalidParameterError(
                f"prompts times n exceed {MAX_PROMPTS} completions in one request", "prompt"
            )
        if not all(found):
            raise InvalidParameterError("prompt must not be empty", "prompt")
        return list(found)

    def sampling(self, max_tokens: int) -> SamplingParams:
        return self._sampling(max_tokens, self.logprobs)


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=1 << 20)]
