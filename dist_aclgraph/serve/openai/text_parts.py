"""Reads texts that clients send in parts, and builds messages for chat templates. The messages of
chat completions are built in ``chat_message``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_PARTS

STRINGS_PER_PART = 16


class TextPart(Body):
    """A part of a text. The types of parts come from several APIs."""

    type: str
    text: str | None = None
    refusal: str | None = None


def read_texts(raw: Raw, param: str, offered: Collection[str]) -> list[str]:
    """Return the texts of a string or of an array of parts.

    Args:
        offered: the types of parts that count as text.

    Raises:
        InvalidParameterError: a part is not text, or there are too many parts.
    """
    data = bytes(raw)
    if not data.startswith(b"["):
        return [decode(data, str, param)]
    check_num_strings(data, STRINGS_PER_PART * MAX_PARTS, param)
    parts = decode(data, list[TextPart], param)
    if len(parts) > MAX_PARTS:
        raise InvalidParameterError(
            f"{param} has {len(parts)} parts; at most {MAX_PARTS} are allowed", param
        )
    return [text_of(part, f"{param}.{i}", offered) for i, part in enumerate(parts)]


def text_of(part: TextPart, param: str, offered: Collection[str]) -> str:
    """Return the text of a part.

    Raises:
        InvalidParameterError: the part is not text.
    """
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if part.type not in offered:
        raise not_offered(part.type, param)
    if text is None:
        raise InvalidParameterError(f"{param}.{name} is missing", f"{param}.{name}")
    return text


def not_offered(kind: str, param: str) -> InvalidParameterError:
    """Return the error for content that is not text."""
    return InvalidParameterError(
        f"{param}: content of type {kind!r:.40} is not offered; send text", param
    )


def message(
    role: str,
    texts: Sequence[str],
    *,
    reasoning: str | None = None,
    calls: Sequence[dict[str, Any]] = (),
    call_id: str | None = None,
) -> dict[str, Any]:
    """Return a message in the form that chat templates need."""
    content: str | list[dict[str, str]] | None = None
    if len(texts) == 1:
        content = texts[0]
    elif texts:
        content = [{"type": "text", "text": text} for text in texts]
    elif role != "assistant":
        content = ""
    return {
        "role": role,
        "content": content,
        "name": None,
        "reasoning_content": reasoning or None,
        "tool_calls": list(calls) or None,
        "tool_call_id": call_id,
    }


def texts_of(found: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content."""
    content = found["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or ()]


def reasoning_variables(effort: str | None) -> dict[str, Any]:
    """Return the chat templates' variables that set the reasoning's effort, or turn it off."""
    if effort is None:
        return {}
    return thinking_variables(is_on=False) if effort == "none" else {"reasoning_effort": effort}


def thinking_variables(*, is_on: bool) -> dict[str, Any]:
    """Return the chat templates' variables that turn reasoning on or off, for several models."""
    return {"enable_thinking": is_on, "thinking": is_on}
