"""Tools of a chat request: their definitions, the choice between them, and calls in the history."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_TOOLS

MAX_BYTES = 1 << 20  # of all definitions
MAX_STRINGS = 1 << 15
MAX_CALLS = 128  # of one message
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NOTHING = (b"", b"null", b"[]")

Mode = Literal["none", "auto", "required"]


class _Function(Body, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True):
    """A tool that the answer may call."""

    PARTS: ClassVar = {"function": _Function}

    type: str
    function: _Function


class _Named(Body, kw_only=True):
    name: str


class _Item(Body, kw_only=True):
    type: str
    function: _Named | None = None


class _AllowedTools(Body, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Item], Meta(max_length=MAX_TOOLS)]


class _Choice(Body, kw_only=True):
    type: Literal["function", "allowed_tools"]
    function: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _CalledFunction(Body, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body, kw_only=True):
    """A call in an assistant's message."""

    PARTS: ClassVar = {"function": _CalledFunction}

    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may or must call.

    Attributes:
        definitions: the tools as the client sent them, for the chat template.
        schemas: JSON schemas of the parameters, by name.
        strict: names of tools whose arguments must match their schemas.
        named: whether the request names the one tool that is called.
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


def read_tools(tools: Raw, choice: Raw, is_parallel: bool | None) -> ToolUse | None:
    """Return the tools of a request; None if it has none.

    Raises:
        InvalidParameterError: a definition or the choice is wrong; names the field.
    """
    data = bytes(tools)
    if data in _NOTHING:
        if bytes(choice) not in (b"", b"null", b'"none"', b'"auto"'):
            raise InvalidParameterError("tool_choice needs tools", "tool_choice")
        return None
    if len(data) > MAX_BYTES:
        raise InvalidParameterError(f"tools exceed {MAX_BYTES >> 10} KiB", "tools")
    check_num_strings(data, MAX_STRINGS, "tools")
    found = decode(data, list[Tool], "tools")
    if len(found) > MAX_TOOLS:
        raise InvalidParameterError(
            f"tools has {len(found)} items; at most {MAX_TOOLS} are allowed", "tools"
        )
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(found):
        if tool.type != "function":
            raise InvalidParameterError(
                f"tools.{i}.type is {tool.type!r:.40}; only tools of type function are offered",
                f"tools.{i}.type",
            )
        name = tool.function.name
        if not _NAME.fullmatch(name) or name in schemas:
            problem = "is used twice" if name in schemas else "is not a name"
            raise InvalidParameterError(
                f"tools.{i}.function.name: {name!r:.140} {problem}; a name has 1 to 128 letters, "
                "digits and characters of _ . : / -",
                f"tools.{i}.function.name",
            )
        schemas[name] = tool.function.parameters or {}
    mode, allowed, named = _read_choice(choice)
    if unknown := sorted(allowed - schemas.keys()):
        raise InvalidParameterError(
            f"tool_choice: there is no tool {unknown[0]!r:.140}", "tool_choice"
        )
    kept = {name: schema for name, schema in schemas.items() if not allowed or name in allowed}
    strict = frozenset(tool.function.name for tool in found if tool.function.strict)
    return ToolUse(
        definitions=tuple(decode(data, list[dict[str, Any]], "tools")),
        schemas=kept,
        strict=strict & kept.keys(),
        mode=mode,
        named=named,
        is_parallel=is_parallel is not False,
    )


def _read_choice(choice: Raw) -> tuple[Mode, frozenset[str], bool]:
    """Return the mode, the names of allowed tools (empty: all), and whether one tool is named."""
    data = bytes(choice)
    if data in (b"", b"null"):
        return "auto", frozenset(), False
    if data.startswith(b'"'):
        return decode(data, Mode, "tool_choice"), frozenset(), False
    found: _Choice = decode(data, _Choice, "tool_choice")
    if found.type == "function":
        if found.function is None:
            raise InvalidParameterError("tool_choice.function is missing", "tool_choice")
        return "required", frozenset({found.function.name}), True
    if found.allowed_tools is None:
        raise InvalidParameterError("tool_choice.allowed_tools is missing", "tool_choice")
    names = frozenset(each.function.name for each in found.allowed_tools.tools if each.function)
    if not names:
        raise InvalidParameterError("tool_choice.allowed_tools has no tools", "tool_choice")
    return found.allowed_tools.mode, names, False


def read_calls(calls: Raw, param: str) -> list[dict[str, Any]] | None:
    """Return the calls of an assistant's message, for the chat template; None without calls.

    Templates want arguments as an object; a text that is no object is left as it is.
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
        {
            "id": call.id or "",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _as_object(call.function.arguments),
            },
        }
        for call in found
    ]


def _as_object(arguments: str | dict[str, Any] | None) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
