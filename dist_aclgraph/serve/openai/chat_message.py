"""The messages of chat requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_MESSAGES, MAX_PARTS
from dist_aclgraph.serve.openai.text_parts import TextPart, read_texts, text_of
from dist_aclgraph.serve.openai.tools import (
    CalledFunction,
    ToolCall,
    call_for_template,
    read_calls,
)

MAX_ROLE_CHARS = 64


class ContentPart(TextPart):
    """A part of a message: a text, or reasoning in the forms of Mistral, Anthropic and
    LangChain.
    """

    thinking: Raw = Raw()
    reasoning: str | None = None
    data: str | None = None
    signature: str | None = None

    @property
    def is_reasoning(self) -> bool:
        return self.type in ("thinking", "redacted_thinking", "reasoning")

    def thoughts(self, param: str) -> list[str]:
        """Return the texts of reasoning; an empty list if the part has encrypted reasoning."""
        if bytes(self.thinking) not in (b"", b"null"):
            return read_texts(self.thinking, f"{param}.thinking", ("text",))
        found = self.text if self.reasoning is None else self.reasoning
        return [] if found is None else [found]


class ChatMessage(Body):
    """A message. All fields of a client's ``message.model_dump()`` are allowed.

    A message may have any role that the chat template supports.
    """

    PARTS: ClassVar = {
        "content": ContentPart,
        "function_call": CalledFunction,
        "tool_calls": ToolCall,
    }

    role: Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_CHARS)]
    content: Annotated[Raw, schemas.CONTENT] = ABSENT
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: Annotated[Raw, schemas.CALLED] = ABSENT  # older form of tool_calls
    annotations: Annotated[Raw, schemas.ANNOTATIONS] = ABSENT
    tool_calls: Annotated[Raw, schemas.TOOL_CALLS] = ABSENT
    tool_call_id: str | None = None
    # field of DeepSeek's and Mistral's APIs: the answer continues the last message
    prefix: bool | None = None

    def for_template(self, param: str) -> dict[str, Any]:
        """Return the fields for chat templates: a role, a content, and optional fields.

        Args:
            param: the message's position in the body; used in error messages.
        """
        name = "tool_calls"
        calls = read_calls(self.tool_calls, f"{param}.{name}")
        if calls is None and bytes(self.function_call) not in (b"", b"null"):
            name = "function_call"
            called = decode(self.function_call, CalledFunction, f"{param}.{name}")
            calls = [call_for_template(None, called.name, called.arguments)]
        if calls is not None and self.role != "assistant":
            raise InvalidParameterError(
                f"{param}.{name}: only an assistant's message has calls", f"{param}.{name}"
            )
        if not (bytes(self.annotations) or b"null").startswith((b"[", b"null")):
            raise InvalidParameterError(f"{param}.annotations must be an array or null", param)
        content, reasoning = self._content(f"{param}.content")
        return {
            "role": self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning or reasoning,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
        }

    def _content(self, param: str) -> tuple[str | list[dict[str, str]] | None, str | None]:
        """Return a text or text parts, and the reasoning that is among the parts.

        The content is None if an assistant's message has no content. A refusal counts as text. A
        message with the result of a tool may also have no content.
        """
        data = bytes(self.content)
        if data in (b"", b"null"):
            if self.role == "assistant":
                return self.refusal, None
            if self.role in ("tool", "function"):
                return "", None
            raise InvalidParameterError(f"{param} is missing", param)
        if not data.startswith(b"["):
            return str(decode(data, str, param)), None
        check_num_strings(data, 4 * MAX_PARTS, param)  # a part has at most four strings
        kind = self.kind_of_part(ContentPart)
        parts = decode(data, list[str | kind], param)  # type: ignore[valid-type]
        if len(parts) > MAX_PARTS:
            raise InvalidParameterError(
                f"{param} has {len(parts)} parts; at most {MAX_PARTS} are allowed", param
            )
        texts, thoughts = [], []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                texts.append(part)
            elif self.role == "assistant" and part.is_reasoning:
                thoughts += part.thoughts(f"{param}.{i}")
            else:
                texts.append(text_of(part, f"{param}.{i}", schemas.TEXT_PARTS))
        content = [{"type": "text", "text": text} for text in texts] or ""
        return content, "\n".join(thoughts) or None


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
