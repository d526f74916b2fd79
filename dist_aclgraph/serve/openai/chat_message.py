"""The messages of chat requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_MESSAGES, MAX_PARTS
from dist_aclgraph.serve.openai.text_parts import TextPart, text_of
from dist_aclgraph.serve.openai.tools import ToolCall, read_calls


class ChatMessage(Body):
    """A message. All fields of a client's ``message.model_dump()`` are allowed."""

    PARTS: ClassVar = {"content": TextPart, "tool_calls": ToolCall}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Raw, schemas.CONTENT] = ABSENT
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Raw, schemas.ANNOTATIONS] = ABSENT
    tool_calls: Annotated[Raw, schemas.TOOL_CALLS] = ABSENT
    tool_call_id: str | None = None
    prefix: bool | None = None  # of DeepSeek and Mistral: the answer continues the last message

    def for_template(self, param: str) -> dict[str, Any]:
        """Return the fields for chat templates: a role, a content, and optional fields.

        Args:
            param: the message's position in the body; used in error messages.
        """
        calls = read_calls(self.tool_calls, f"{param}.tool_calls")
        if calls is not None and self.role != "assistant":
            raise InvalidParameterError(
                f"{param}.tool_calls: only an assistant's message has calls", f"{param}.tool_calls"
            )
        if not (bytes(self.annotations) or b"null").startswith((b"[", b"null")):
            raise InvalidParameterError(f"{param}.annotations must be an array or null", param)
        return {
            "role": self.role,
            "content": self._content(f"{param}.content"),
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
        }

    def _content(self, param: str) -> str | list[dict[str, str]] | None:
        """Return a text or text parts; None if an assistant's message has no content. A refusal is
        text, too; the result of a tool may be absent.
        """
        data = bytes(self.content)
        if data in (b"", b"null"):
            if self.role == "assistant":
                return self.refusal
            if self.role == "tool":
                return ""
            raise InvalidParameterError(f"{param} is missing", param)
        if not data.startswith(b"["):
            return str(decode(data, str, param))
        check_num_strings(data, 4 * MAX_PARTS, param)  # each part has two keys and two values
        kind = self.kind_of_part(TextPart)
        parts = decode(data, list[str | kind], param)  # type: ignore[valid-type]
        if len(parts) > MAX_PARTS:
            raise InvalidParameterError(
                f"{param} has {len(parts)} parts; at most {MAX_PARTS} are allowed", param
            )
        texts = [
            part if isinstance(part, str) else text_of(part, f"{param}.{i}", schemas.TEXT_PARTS)
            for i, part in enumerate(parts)
        ]
        return [{"type": "text", "text": text} for text in texts] or ""


def messages_for_template(body: Body, raw: Raw) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages of a body in the form that chat templates need, and whether the answer
    continues the last message.
    """
    messages = decode(raw, list[body.kind_of_part(ChatMessage)], "messages")  # type: ignore[misc]
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidParameterError(
            f"messages has {len(messages)} items; it must have 1 to {MAX_MESSAGES}", "messages"
        )
    found = [message.for_template(f"messages.{i}") for i, message in enumerate(messages)]
    last = messages[-1]
    return found, last.role == "assistant" and bool(last.prefix)
