"""Converts the input of POST /v1/responses, which has items, to messages for chat templates."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, TypeAlias

from msgspec import Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.schemas import MAX_ITEMS
from dist_aclgraph.serve.openai.text_parts import message, read_texts, texts_of
from dist_aclgraph.serve.openai.tools import call_for_template

PART_TYPES = ("input_text", "output_text", "text", "refusal")
REASONING_TYPES = ("reasoning_text", "summary_text", "text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
SYSTEM_ROLES = ("system", "developer")
ROLES = ("system", "developer", "user", "assistant")
ENCODED = "text:"  # our values of ``encrypted_content`` begin with this text
_NOTHING = (b"", b"null", b"[]")
# The keys are the names by which the model knows the functions. The values are the namespace and
# the name of the function.
Namespaces: TypeAlias = Mapping[str, tuple[str, str]]


class _Item(Body, kw_only=True):
    """An item of the input. Other fields are ignored."""

    type: str | None = None
    role: str | None = None
    content: Raw = Raw()
    summary: Raw = Raw()
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: Raw = Raw()

    def __post_init__(self) -> None:
        # Raise the error during decoding, which stops at the first wrong item. A large array of
        # wrong items is therefore never built in memory.
        if self.type == "item_reference":
            raise ValueError(
                "no response is stored; send the item itself, as clients do with store set to false"
            )
        if self.type is None and self.role is None:
            raise ValueError("the item has neither a type nor a role")
        if self.type not in (None, *ITEM_TYPES):
            raise ValueError(
                f"items of type {self.type!r:.40} are not offered; the types are "
                f"{', '.join(ITEM_TYPES)}"
            )


def name_in(namespace: str, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}__{name}"


def read_input(raw: Raw, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a request's input.

    The instructions and the system messages at the beginning become one system message, because
    many templates allow only one system message.

    Raises:
        InvalidParameterError: an item is wrong, or there are too many items.
    """
    data = bytes(raw)
    if not data.startswith(b"["):
        messages = [message("user", [decode(data, str, "input")])]
    else:
        items = decode(data, list[_Item], "input")
        if len(items) > MAX_ITEMS:
            raise InvalidParameterError(
                f"input has {len(items)} items; at most {MAX_ITEMS} are allowed", "input"
            )
        conversation = _Conversation()
        for i, item in enumerate(items):
            conversation.add(item, f"input.{i}")
        messages = conversation.end()
    rest = list(dropwhile(lambda found: found["role"] in SYSTEM_ROLES, messages))
    if not rest:
        raise InvalidParameterError("input needs at least one message of another role", "input")
    system = [instructions] if instructions else []
    for found in messages[: len(messages) - len(rest)]:
        system += texts_of(found)
    return [message("system", ["\n\n".join(system)]), *rest] if system else rest


@dataclass
class _Conversation:
    """Builds messages. The reasoning, text and calls of a turn become one message of
    the assistant.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    _reasoning: str = ""
    _texts: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, item: _Item, param: str) -> None:
        """Add an item.

        Args:
            param: the item's position in the body; used in error messages.
        """
        if item.type == "reasoning":
            if self._texts or self._calls:
                self.end()
            self._reasoning += _read_reasoning(item, param)
        elif item.type == "function_call":
            call_id, name = _call_id(item, param), _needed(item.name, f"{param}.name")
            if item.namespace is not None:
                name = name_in(item.namespace, name)
            self._calls.append(call_for_template(call_id, name, item.arguments))
        elif item.type == "function_call_output":
            call_id = _call_id(item, param)
            self.end()
            texts = _read_texts(item.output, f"{param}.output")
            self.messages.append(message("tool", texts, call_id=call_id))
        else:
            self._add_message(item, param)

    def _add_message(self, item: _Item, param: str) -> None:
        if item.role is None or item.role not in ROLES:
            raise InvalidParameterError(
                f"{param}.role is {item.role!r:.40}; it must be one of {', '.join(ROLES)}",
                f"{param}.role",
            )
        # An assistant's message may have no content, because it may consist of calls only.
        is_empty = item.role == "assistant" and bytes(item.content) in _NOTHING
        texts = [] if is_empty else _read_texts(item.content, f"{param}.content")
        if item.role == "assistant":
            if self._texts or self._calls:
                self.end()
            self._texts = texts
        else:
            self.end()
            self.messages.append(message(item.role, texts))

    def end(self) -> list[dict[str, Any]]:
        """End the assistant's message, and return all messages."""
        if self._texts or self._calls or self._reasoning:
            self.messages.append(
                message("assistant", self._texts, reasoning=self._reasoning, calls=self._calls)
            )
        self._reasoning, self._texts, self._calls = "", [], []
        return self.messages


def _read_reasoning(item: _Item, param: str) -> str:
    own = decode_reasoning(item.encrypted_content or "")
    if own and bytes(item.content) in _NOTHING:
        return own
    for name, raw in (("content", item.content), ("summary", item.summary)):
        if bytes(raw) not in _NOTHING:
            return "\n".join(read_texts(raw, f"{param}.{name}", REASONING_TYPES))
    return ""


def encode_reasoning(text: str) -> str:
    """Return the value of ``encrypted_content`` for the text of a reasoning.

    The value is not encrypted, because the client also gets the plain text. Clients such as Codex
    return only this value with the next request, and not the text.
    """
    return ENCODED + base64.b64encode(text.encode()).decode()


def decode_reasoning(value: str) -> str:
    """Return the text in a value of ``encode_reasoning``; "" for any other value."""
    if not value.startswith(ENCODED):
        return ""
    try:
        return base64.b64decode(value.removeprefix(ENCODED), validate=True).decode()
    except ValueError:
        return ""


def _read_texts(raw: Raw, param: str) -> list[str]:
    if bytes(raw) in (b"", b"null"):
        raise InvalidParameterError(f"{param} is missing", param)
    return read_texts(raw, param, PART_TYPES)


def _call_id(item: _Item, param: str) -> str:
    return _needed(item.call_id, f"{param}.call_id")


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise InvalidParameterError(f"{param} is missing", param)
    return value
