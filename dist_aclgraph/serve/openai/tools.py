"""Reads the tools of a request: definitions, the choice of a tool, and calls in the history."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.tools import without_marks
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.sampling_fields import without_none
from dist_aclgraph.serve.openai.schemas import HOSTED, MAX_NAME_CHARS, MAX_TOOLS

MAX_BYTES = 1 << 20  # maximum number of bytes of all definitions together
MAX_STRINGS = 1 << 15
MAX_CALLS = 128  # maximum number of calls of one message
_NAME = re.compile(r"[\w.:/-]+")
_NOTHING = (b"", b"null", b"[]")

T = TypeVar("T")
Mode = Literal["none", "auto", "required"]
# The mode for each name that a request may contain. Mistral and Anthropic write ``any`` in place of
# ``required``.
MODES: dict[str, Mode] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}


class Function(Body, kw_only=True):
    """A client's description of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True):
    """A tool that the answer may call."""

    PARTS: ClassVar = {"function": Function}

    type: str | None = None
    function: Function | None = None


class _Named(Body, kw_only=True):
    name: str


class _NamedTool(Body, kw_only=True):
    type: str
    function: _Named | None = None


class _AllowedTools(Body, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Meta(max_length=MAX_TOOLS)]


class _ToolChoice(Body, kw_only=True):
    """The value of ``tool_choice``. Clients of other APIs write a tool's name beside the type."""

    type: Literal["function", "tool", "allowed_tools", "none", "auto", "required", "any"] = (
        "function"
    )
    name: str | None = None
    function: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class CalledFunction(Body, kw_only=True):
    """The function of a call in an assistant's message."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body, kw_only=True):
    """A call in an assistant's message."""

    PARTS: ClassVar = {"function": CalledFunction}

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


@dataclass(frozen=True)
class ToolChoice:
    """The choice of the tools that an answer may or must call.

    Attributes:
        names: names of the allowed tools; an empty set allows all tools.
        is_named: whether the request names exactly one tool, which must be called.
    """

    mode: Mode = "auto"
    names: frozenset[str] = frozenset()
    is_named: bool = False


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may or must call.

    Attributes:
        definitions: the tools in the form that chat templates need; each tool has a type.
        schemas: for each tool's name, the JSON schema of its parameters.
        strict: names of tools whose arguments must match their schemas.
        named: whether the request names exactly one tool, which must be called.
        is_parallel: whether the answer may have several calls.
    """

    definitions: tuple[Mapping[str, Any], ...]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    mode: Mode
    named: bool = False
    is_parallel: bool = True

    @property
    def max_calls(self) -> int | None:
        return None if self.is_parallel and not self.named else 1


def read_tools(
    tools: Raw, choice: Raw, is_parallel: bool | None, *, is_strict: bool
) -> tuple[ToolUse | None, list[str]]:
    """Return the tools of a request (None if there are no tools), and the field names of the tools
    that are left out (``leave_out_hosted``).

    Raises:
        InvalidParameterError: a definition or the choice is wrong; the error names the field.
    """
    asked = _read_choice(choice)
    found, left_out = leave_out_hosted(
        decode_tools(tools, Tool), lambda tool: tool.type or "", is_strict=is_strict
    )
    if not found:
        check_needs_no_tools(asked)
        return None, left_out
    definitions = decode(bytes(tools), list[dict[str, Any]], "tools")
    use = use_tools(
        [_function_of(tool, f"tools.{i}") for i, tool in found.items()],
        asked,
        is_parallel=is_parallel is not False,
        places=[f"tools.{i}.function.name" for i in found],
        # Templates may need the type, which a request may omit.
        definitions=[{"type": "function"} | without_none(definitions[i]) for i in found],
    )
    return use, left_out


def _function_of(tool: Tool, place: str) -> Function:
    check_type("function" if tool.type is None else tool.type, place)
    if tool.function is None:
        raise InvalidParameterError(f"{place}.function is missing", f"{place}.function")
    return tool.function


def decode_tools(tools: Raw, kind: type[T]) -> list[T]:
    """Return the definitions of tools; an empty list if there are no tools.

    Raises:
        InvalidParameterError: there are too many tools, or a tool is not a ``kind``.
    """
    data = bytes(tools)
    if data in _NOTHING:
        return []
    if len(data) > MAX_BYTES:
        raise InvalidParameterError(f"tools exceed {MAX_BYTES >> 10} KiB", "tools")
    check_num_strings(data, MAX_STRINGS, "tools")
    found: list[T] = decode(data, list[kind], "tools")  # type: ignore[valid-type]
    if len(found) > MAX_TOOLS:
        raise InvalidParameterError(
            f"tools has {len(found)} items; at most {MAX_TOOLS} are allowed", "tools"
        )
    return found


def leave_out_hosted(
    tools: Sequence[T], type_of: Callable[[T], str], *, is_strict: bool
) -> tuple[dict[int, T], list[str]]:
    """Return the tools that the model may see, by position in ``tools``; and the field names of the
    other tools, such as ``tools[0]``.

    A tool that a provider runs itself, such as ``web_search``, is left out, because no client can
    run it. If ``is_strict`` is true, no tool is left out, and ``check_type`` later refuses a
    provider's tool.
    """
    kept = {i: t for i, t in enumerate(tools) if is_strict or not type_of(t).startswith(HOSTED)}
    return kept, [f"tools[{i}]" for i in range(len(tools)) if i not in kept]


def check_needs_no_tools(choice: ToolChoice) -> None:
    """Raise an error if a request without tools asks for a call."""
    if choice.mode == "required" or choice.names:
        raise InvalidParameterError("tool_choice needs tools", "tool_choice")


def check_type(kind: str, place: str, offered: str = "function") -> None:
    """Raise an error if the service cannot offer a tool of this type.

    Args:
        place: the tool's position in the body; used in error messages.
    """
    if kind != offered:
        raise InvalidParameterError(
            f"{place}.type is {kind!r:.40}; only tools of type {offered} are offered",
            f"{place}.type",
        )


def use_tools(
    functions: Sequence[Function],
    choice: ToolChoice,
    *,
    is_parallel: bool,
    places: Sequence[str],
    definitions: Sequence[Mapping[str, Any]] | None = None,
) -> ToolUse:
    """Return the tools that an answer may call.

    Args:
        places: for each tool, the field that contains its name; used in error messages.
        definitions: the definitions for the chat template; if None, ``functions`` are used.

    Raises:
        InvalidParameterError: a name is wrong, or the choice names a tool that does not exist.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for function, place in zip(functions, places, strict=True):
        name = function.name
        is_name = len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(without_marks(name))
        if not is_name or name in schemas:
            problem = "is used twice" if name in schemas else "is not a name"
            raise InvalidParameterError(
                f"{place}: {name!r:.140} {problem}; a name has 1 to {MAX_NAME_CHARS} letters, "
                "digits and characters of _ . : / -",
                place,
            )
        schemas[name] = function.parameters or {}
    if unknown := sorted(choice.names - schemas.keys()):
        raise InvalidParameterError(
            f"tool_choice: there is no tool {unknown[0]!r:.140}", "tool_choice"
        )
    kept = {
        name: schema for name, schema in schemas.items() if not choice.names or name in choice.names
    }
    strict = frozenset(function.name for function in functions if function.strict)
    return ToolUse(
        definitions=tuple(map(_definition, functions) if definitions is None else definitions),
        schemas=kept,
        strict=strict & kept.keys(),
        mode=choice.mode,
        named=choice.is_named,
        is_parallel=is_parallel,
    )


def _definition(function: Function) -> dict[str, Any]:
    """Return a tool in the form that chat templates need."""
    described = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    kept = {name: value for name, value in described.items() if value is not None}
    return {"type": "function", "function": kept}


def _read_choice(choice: Raw) -> ToolChoice:
    data = bytes(choice)
    if data in (b"", b"null"):
        return ToolChoice()
    if data.startswith(b'"'):
        return ToolChoice(MODES[decode(data, Literal["any", Mode], "tool_choice")])
    found: _ToolChoice = decode(data, _ToolChoice, "tool_choice")
    if found.type in ("function", "tool"):
        name = found.name if found.function is None else found.function.name
        if name is None:
            raise InvalidParameterError("tool_choice.function is missing", "tool_choice")
        return ToolChoice("required", frozenset({name}), is_named=True)
    if (mode := MODES.get(found.type)) is not None:
        return ToolChoice(mode)
    if found.allowed_tools is None:
        raise InvalidParameterError("tool_choice.allowed_tools is missing", "tool_choice")
    names = frozenset(each.function.name for each in found.allowed_tools.tools if each.function)
    if not names:
        raise InvalidParameterError("tool_choice.allowed_tools has no tools", "tool_choice")
    return ToolChoice(found.allowed_tools.mode, names)


def read_calls(calls: Raw, param: str) -> list[dict[str, Any]] | None:
    """Return the calls of an assistant's message, for the chat template; None if there are no
    calls.
    """
    data = bytes(calls)
    if data in _NOTHING:
        return None
    check_num_strings(data, MAX_STRINGS, param)
    found = decode(data, list[ToolCall], param)
    if len(found) > MAX_CALLS:
        raise InvalidParameterError(
            f"{param} has {len(found)} calls; at most {MAX_CALLS} are allowed", param
        )
    return [
        call_for_template(call.id, call.function.name, call.function.arguments) for call in found
    ]


def call_for_template(
    call_id: str | None, name: str, arguments: str | dict[str, Any] | None
) -> dict[str, Any]:
    """Return a call for the chat template, which gets the arguments as an object."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or "", "type": "function", "function": function}
