"""The body of POST /v1/responses.

``store``, ``metadata``, ``user``, ``service_tier``, ``prompt_cache_key`` and similar fields are
accepted and have no effect. A field that needs a stored response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS, StructuredOutputs
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode
from dist_aclgraph.serve.openai.conversation import Conversation
from dist_aclgraph.serve.openai.counted import decode_strings
from dist_aclgraph.serve.openai.sampling_fields import (
    BUDGETS,
    first_given,
    make_params,
    without_none,
)
from dist_aclgraph.serve.openai.schemas import MAX_TOOLS
from dist_aclgraph.serve.openai.structured import TextFormat, read_text_format
from dist_aclgraph.serve.openai.template_fields import read_variables
from dist_aclgraph.serve.openai.text_parts import reasoning_variables
from dist_aclgraph.serve.openai.tools import (
    MODES,
    Function,
    Mode,
    ToolChoice,
    ToolUse,
    check_needs_no_tools,
    check_type,
    decode_tools,
    leave_out_hosted,
    use_tools,
)
from dist_aclgraph.serve.openai.types import MAX_CACHE_SALT_CHARS, MAX_PROMPT, MAX_STOP_BYTES
from dist_aclgraph.serve.responses.input import Namespaces, name_in, read_input
from dist_aclgraph.text.chat_template import ChatOptions

# Entries of ``include``: log-probabilities, and the encoded reasoning, which the client may send
# with its next request.
LOGPROBS = "message.output_text.logprobs"
ENCODED_REASONING = "reasoning.encrypted_content"
MAX_INCLUDED = 64
MAX_METADATA_BYTES = 16 << 10  # small, because each event with a response contains the metadata
_NOTHING = (b"", b"null")


class _TextFormat(Body):
    format: Raw = ABSENT
    verbosity: str | None = None


class _Reasoning(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Function(Body, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ResponsesTool(_Function, kw_only=True):
    """A function, or a namespace with functions."""

    tools: Annotated[list[_Function], Meta(max_length=MAX_TOOLS)] | None = None


class _AllowedTool(Body, kw_only=True):
    type: Literal["function"]
    name: str


class _ResponsesChoice(Body, kw_only=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[_AllowedTool], Meta(max_length=MAX_TOOLS)] | None = None


class ResponsesRequest(Body, kw_only=True):
    model: str
    input: Annotated[Raw, schemas.INPUT]
    instructions: str | None = None
    tools: Annotated[Raw, schemas.FLAT_TOOLS] = ABSENT
    tool_choice: Annotated[Raw, schemas.FLAT_TOOL_CHOICE] = ABSENT
    parallel_tool_calls: bool | None = None
    text: Annotated[Raw, schemas.TEXT_CONFIG] = ABSENT
    reasoning: Annotated[Raw, schemas.VARIABLES] = ABSENT
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Annotated[Raw, schemas.STOP] = ABSENT
    seed: int | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDED)] | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    chat_template_kwargs: Annotated[Raw, schemas.VARIABLES] = ABSENT
    thinking_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    # If one of these fields has a value, the service refuses the request.
    previous_response_id: str | None = None
    conversation: Annotated[Raw, schemas.NO_VALUE] = ABSENT
    prompt: Annotated[Raw, schemas.NO_VALUE] = ABSENT
    background: bool | None = None
    # The service ignores these fields.
    store: bool | None = None
    metadata: Annotated[Raw, schemas.OBJECT] = ABSENT
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    stream_options: Annotated[Raw, schemas.IGNORED] = ABSENT
    client_metadata: Annotated[Raw, schemas.IGNORED] = ABSENT
    context_management: Annotated[Raw, schemas.IGNORED] = ABSENT

    def check_fields(self) -> None:
        if len(bytes(self.metadata)) > MAX_METADATA_BYTES:
            raise InvalidParameterError(
                f"metadata has {len(bytes(self.metadata))} bytes; at most {MAX_METADATA_BYTES} are "
                "allowed",
                "metadata",
            )
        needs_store = {
            "previous_response_id": bool(self.previous_response_id),
            "conversation": bytes(self.conversation) not in _NOTHING,
            "prompt": bytes(self.prompt) not in _NOTHING,
        }
        for name, is_given in needs_store.items():
            if is_given:
                raise InvalidParameterError(
                    f"{name}: no response is stored; send all items of the conversation as input",
                    name,
                )
        if self.background:
            raise InvalidParameterError(
                "background is not offered, because no response is stored; set stream to true",
                "background",
            )

    def asked(
        self, tools: ToolUse | None, defaults: Mapping[str, Any], context_len: int
    ) -> Conversation:
        """Return the conversation that the request asks to continue.

        Args:
            tools: the request's tools, from ``read_tools``.
            defaults: values of sampling parameters that the request omits.
        """
        budget = first_given(self, *BUDGETS)
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop": self._stop,
            "seed": self.seed,
            "structured_outputs": self._form(),
            "thinking_tokens": getattr(self, budget),
        }
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        params = make_params(
            {
                **defaults,
                **without_none(given),
                "max_tokens": self.max_output_tokens,
                "logprobs": logprobs,
            },
            {"max_tokens": "max_output_tokens", "thinking_tokens": budget},
        )
        truncates = self.truncation == "auto"
        return Conversation(
            messages=read_input(self.input, self.instructions),
            params=params,
            options=ChatOptions(
                variables=reasoning_variables(self._effort())
                | read_variables(self.chat_template_kwargs)
            ),
            tools=None if tools is None or tools.mode == "none" else tools,
            cache_salt=self.cache_salt or "",
            form_param="text.format",
            limit_param="input",
            budget_param=budget,
            off_param="reasoning.effort" if self._effort() == "none" else "",
            most_prompt_tokens=max(context_len, MAX_PROMPT) if truncates else context_len,
            truncated=partial(self._truncated, context_len) if truncates else _all_of,
        )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def wants_encoded_reasoning(self) -> bool:
        return ENCODED_REASONING in (self.include or ())

    @property
    def _stop(self) -> tuple[str, ...] | None:
        if bytes(self.stop) in _NOTHING:
            return None
        return tuple(decode_strings(self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES, "stop"))

    @property
    def text_format(self) -> Raw:
        """The output format, as the client sent it; empty if the request demands no format."""
        if bytes(self.text) in _NOTHING:
            return Raw()
        found: _TextFormat = decode(self.text, _TextFormat, "text")
        return found.format if bytes(found.format) not in _NOTHING else Raw()

    def _form(self) -> StructuredOutputs | None:
        raw = self.text_format
        if not bytes(raw):
            return None
        return read_text_format(decode(raw, TextFormat, "text.format"), "text.format")

    def _effort(self) -> str | None:
        if bytes(self.reasoning) in _NOTHING:
            return None
        found: _Reasoning = decode(self.reasoning, _Reasoning, "reasoning")
        return found.effort

    def _truncated(self, context_len: int, ids: list[int]) -> list[int]:
        return ids[-max(1, context_len - max(1, self.max_output_tokens or 1)) :]

    def read_tools(self) -> tuple[ToolUse | None, Namespaces, list[str]]:
        """Return the tools that the answer may call; the functions of namespaces; and the field
        names of the tools that are left out (``leave_out_hosted``).

        Raises:
            InvalidParameterError: a tool is wrong, or is of a type that is not offered.
        """
        choice = self._choice()
        tools, left_out = leave_out_hosted(
            decode_tools(self.tools, _ResponsesTool),
            lambda tool: tool.type,
            is_strict=self.is_strict,
        )
        if not tools:
            check_needs_no_tools(choice)
            return None, {}, left_out
        functions: list[Function] = []
        places: list[str] = []
        namespaces: dict[str, tuple[str, str]] = {}
        for i, tool in tools.items():
            if tool.type != "namespace":
                check_type(tool.type, f"tools.{i}")
                functions.append(_function(tool, tool.name))
                places.append(f"tools.{i}.name")
            for j, inner in enumerate(tool.tools or ()):
                check_type(inner.type, f"tools.{i}.tools.{j}")
                name = name_in(tool.name, inner.name)
                namespaces[name] = tool.name, inner.name
                functions.append(_function(inner, name))
                places.append(f"tools.{i}.tools.{j}.name")
        is_parallel = self.parallel_tool_calls is not False
        found = use_tools(functions, choice, is_parallel=is_parallel, places=places)
        return found, namespaces, left_out

    def _choice(self) -> ToolChoice:
        data = bytes(self.tool_choice)
        if data in _NOTHING:
            return ToolChoice()
        if data.startswith(b'"'):
            return ToolChoice(MODES[decode(data, Literal["any", Mode], "tool_choice")])
        found: _ResponsesChoice = decode(data, _ResponsesChoice, "tool_choice")
        if (mode := MODES.get(found.type)) is not None:
            return ToolChoice(mode)
        if found.type == "function" and found.name is not None:
            return ToolChoice("required", frozenset({found.name}), is_named=True)
        if found.type == "allowed_tools" and found.tools:
            return ToolChoice(found.mode, frozenset(tool.name for tool in found.tools))
        raise InvalidParameterError(
            f"tool_choice of type {found.type!r:.40} is not offered, or does not name its tools; "
            "choose function with a name, or allowed_tools with tools",
            "tool_choice",
        )


def _function(tool: _Function, name: str) -> Function:
    return Function(
        name=name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )


def _all_of(ids: list[int]) -> list[int]:
    return ids
