"""Bodies of POST /v1/messages and of POST /v1/messages/count_tokens.

``cache_control``, ``metadata``, ``service_tier`` and similar fields are accepted and have no
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import MAX_STOP_STRINGS, SamplingParams, StructuredOutputs
from dist_aclgraph.serve.anthropic import schemas
from dist_aclgraph.serve.anthropic.turns import continues, read_messages
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode
from dist_aclgraph.serve.openai.conversation import Conversation
from dist_aclgraph.serve.openai.counted import decode_strings
from dist_aclgraph.serve.openai.errors import ThreadError
from dist_aclgraph.serve.openai.sampling_fields import make_params, without_none
from dist_aclgraph.serve.openai.schemas import IGNORED
from dist_aclgraph.serve.openai.structured import TextFormat, read_text_format
from dist_aclgraph.serve.openai.text_parts import reasoning_variables, thinking_variables
from dist_aclgraph.serve.openai.tools import (
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
from dist_aclgraph.text.chat_template import ChatOptions

MODES: dict[str, Mode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
_NOTHING = (b"", b"null", b"[]", b"{}")


class _ClaudeTool(Body, kw_only=True):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _ClaudeChoice(Body, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class _OutputConfig(Body, kw_only=True):
    effort: str | None = None
    format: TextFormat | None = None


class CountTokensRequest(Body, kw_only=True):
    """The fields that determine the prompt."""

    model: str
    messages: Annotated[Raw, schemas.MESSAGES]
    system: Annotated[Raw, schemas.SYSTEM] = ABSENT
    tools: Annotated[Raw, schemas.TOOLS] = ABSENT
    tool_choice: Annotated[Raw, schemas.TOOL_CHOICE] = ABSENT
    thinking: Annotated[Raw, schemas.THINKING] = ABSENT
    output_config: Annotated[Raw, schemas.OUTPUT_CONFIG] = ABSENT
    output_format: Annotated[Raw, schemas.FORMAT] = ABSENT  # older name of output_config.format
    # If one of these fields has a value, the service refuses the request.
    mcp_servers: Annotated[Raw, IGNORED] = ABSENT
    thread: Annotated[Raw, IGNORED] = ABSENT
    # The service ignores these fields.
    betas: Annotated[Raw, IGNORED] = ABSENT
    cache_control: Annotated[Raw, IGNORED] = ABSENT
    context_management: Annotated[Raw, IGNORED] = ABSENT
    compaction: Annotated[Raw, IGNORED] = ABSENT  # MessagesRequest refuses a value
    diagnostics: Annotated[Raw, IGNORED] = ABSENT
    speed: str | None = None

    def check_fields(self) -> None:
        if bytes(self.mcp_servers) not in _NOTHING:
            raise InvalidParameterError(
                "mcp_servers: this service calls no tools; let the client call them", "mcp_servers"
            )
        if bytes(self.thread) not in _NOTHING:
            raise ThreadError(
                "thread: no conversation is stored; send all messages of the conversation", "thread"
            )

    def counted(self, tools: ToolUse | None, context_len: int) -> Conversation:
        """Return the conversation whose tokens are counted. The conversation may be longer than the
        context.
        """
        return self._conversation(tools, SamplingParams(), max(context_len, MAX_PROMPT))

    def _conversation(
        self, tools: ToolUse | None, params: SamplingParams, most: int, salt: str = ""
    ) -> Conversation:
        messages = read_messages(self.messages, self.system)
        is_open = continues(messages)
        return Conversation(
            messages=messages,
            params=params,
            options=ChatOptions(
                add_generation_prompt=not is_open,
                continue_final_message=is_open,
                variables=self._variables(),
            ),
            tools=None if tools is None or tools.mode == "none" else tools,
            cache_salt=salt,
            is_limit_soft=True,
            form_param=self._form_param,
            budget_param="thinking.budget_tokens",
            off_param="output_config.effort" if self._output_config().effort == "none" else "",
            most_prompt_tokens=most,
        )

    def _variables(self) -> dict[str, Any]:
        found = reasoning_variables(self._output_config().effort)
        thinking = self._thinking()
        if thinking is not None and thinking.type in ("enabled", "adaptive"):
            return found | thinking_variables(is_on=True)
        if thinking is not None and thinking.type == "disabled":
            return found | thinking_variables(is_on=False)
        return found

    def _thinking(self) -> _Thinking | None:
        if bytes(self.thinking) in _NOTHING:
            return None
        found: _Thinking = decode(self.thinking, _Thinking, "thinking")
        return found

    def _output_config(self) -> _OutputConfig:
        if bytes(self.output_config) in _NOTHING:
            return _OutputConfig()
        found: _OutputConfig = decode(self.output_config, _OutputConfig, "output_config")
        return found

    @property
    def _form_param(self) -> str:
        """The field that contains the output format."""
        is_older = bytes(self.output_format) not in _NOTHING and not self._output_config().format
        return "output_format" if is_older else "output_config.format"

    def read_tools(self) -> tuple[ToolUse | None, list[str]]:
        """Return the tools that the answer may call, and the paths, such as ``tools[3]``, of the
        tools that ``leave_out_hosted`` removes.
        """
        choice, is_parallel = self._choice()
        tools, left_out = leave_out_hosted(
            decode_tools(self.tools, _ClaudeTool),
            lambda tool: tool.type or "",
            is_strict=self.is_strict,
        )
        if not tools:
            check_needs_no_tools(choice)
            return None, left_out
        for i, tool in tools.items():
            check_type(tool.type or "custom", f"tools.{i}", "custom")
        functions = [
            Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
            for tool in tools.values()
        ]
        places = [f"tools.{i}.name" for i in tools]
        found = use_tools(functions, choice, is_parallel=is_parallel, places=places)
        return found, left_out

    def _choice(self) -> tuple[ToolChoice, bool]:
        """Return the choice of tools, and whether the answer may have several calls."""
        if bytes(self.tool_choice) in _NOTHING:
            return ToolChoice(), True
        found: _ClaudeChoice = decode(self.tool_choice, _ClaudeChoice, "tool_choice")
        is_named = found.type == "tool"
        if is_named and found.name is None:
            raise InvalidParameterError("tool_choice.name is missing", "tool_choice.name")
        names = frozenset({found.name} if is_named and found.name is not None else ())
        choice = ToolChoice(MODES[found.type], names, is_named=is_named)
        return choice, not found.disable_parallel_tool_use


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: Annotated[Raw, schemas.STOP] = ABSENT
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    # The service ignores these fields.
    metadata: Annotated[Raw, schemas.OBJECT] = ABSENT
    service_tier: str | None = None
    container: Annotated[Raw, IGNORED] = ABSENT
    inference_geo: str | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if bytes(self.compaction) not in _NOTHING:
            raise InvalidParameterError(
                "compaction is not offered; ask for a summary in a message", "compaction"
            )

    def conversation(
        self, tools: ToolUse | None, defaults: Mapping[str, Any], context_len: int
    ) -> Conversation:
        """Return the conversation that the request asks to continue.

        Args:
            tools: the request's tools, from ``read_tools``.
            defaults: values of sampling parameters that the request omits.
        """
        thinking = self._thinking()
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "structured_outputs": self._form(),
            "thinking_tokens": None if thinking is None else thinking.budget_tokens,
        }
        kept = {**defaults, **without_none(given), "max_tokens": self.max_tokens}
        if bytes(self.stop_sequences) not in _NOTHING:
            kept["stop"] = tuple(
                decode_strings(
                    self.stop_sequences, MAX_STOP_STRINGS, MAX_STOP_BYTES, "stop_sequences"
                )
            )
        names = {"stop": "stop_sequences", "thinking_tokens": "thinking.budget_tokens"}
        params = make_params(kept, names)
        return self._conversation(tools, params, context_len, self.cache_salt or "")

    def _form(self) -> StructuredOutputs | None:
        found, param = self._output_config().format, self._form_param
        if param == "output_format":
            found = decode(self.output_format, TextFormat, param)
        return None if found is None else read_text_format(found, param)
