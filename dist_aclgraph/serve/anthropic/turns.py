"""Converts messages of the Messages API to messages for chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings
from dist_aclgraph.serve.openai.schemas import MAX_MESSAGES, MAX_PARTS
from dist_aclgraph.serve.openai.text_parts import (
    STRINGS_PER_PART,
    message,
    not_offered,
    read_texts,
    texts_of,
)
from dist_aclgraph.serve.openai.tools import MAX_CALLS, call_for_template

TEXT_BLOCKS = ("document", "search_result")  # types of a user's blocks that consist of text
# Claude Code sends a block with this text before its system prompt. The block is removed, because
# it differs in each request. With this block, the prompts of two requests would have no common
# prefix.
BILLING = "x-anthropic-billing-header:"
_NOTHING = (b"", b"null")


class _Message(Body, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Raw


class _Block(Body, kw_only=True):
    """A block of a message. Fields that are not listed here, such as ``cache_control``, are
    ignored.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Raw = Raw()
    is_error: bool | None = None
    source: Raw = Raw()  # an object for a document, a text for a search result
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None


class _Source(Body, kw_only=True):
    """The source of a document. Only texts are offered."""

    type: str
    data: str | None = None
    content: Raw = Raw()


def read_messages(messages: Raw, system: Raw) -> list[dict[str, Any]]:
    """Return the messages of a request, the system prompt first.

    System messages at the beginning are added to the system prompt. Later system messages become a
    part of the user's message, because many templates refuse later system messages.

    Raises:
        InvalidParameterError: a message is wrong, or there are too many messages.
    """
    turns = decode(messages, list[_Message], "messages")
    if not 1 <= len(turns) <= MAX_MESSAGES:
        raise InvalidParameterError(
            f"messages has {len(turns)} items; it must have 1 to {MAX_MESSAGES}", "messages"
        )
    prompt: list[str] = []
    if bytes(system) not in _NOTHING:
        texts = read_texts(system, "system", ("text",))
        prompt = [text for text in texts if text and not text.startswith(BILLING)]
    found: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        for each in _messages_of(turn, f"messages.{i}.content"):
            if each["role"] != "system":
                found.append(each)
            elif not found:
                prompt += texts_of(each)
            elif found[-1]["role"] == "user":
                found[-1] = message("user", [*texts_of(found[-1]), *texts_of(each)])
            else:
                found.append({**each, "role": "user"})
    if not found:
        raise InvalidParameterError("messages needs at least one message of the user", "messages")
    return [message("system", prompt), *found] if prompt else found


def continues(messages: list[dict[str, Any]]) -> bool:
    """Return whether the answer continues the last message. This is the case if the last message
    comes from the assistant, has content, and has no calls.
    """
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and not last["tool_calls"]


def _messages_of(turn: _Message, param: str) -> Iterator[dict[str, Any]]:
    data = bytes(turn.content)
    if not data.startswith(b"["):
        yield message(turn.role, [decode(data, str, param)])
        return
    check_num_strings(data, STRINGS_PER_PART * MAX_PARTS, param)
    blocks = decode(data, list[_Block], param)
    if not 1 <= len(blocks) <= MAX_PARTS:
        raise InvalidParameterError(
            f"{param} has {len(blocks)} blocks; it must have 1 to {MAX_PARTS}", param
        )
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for i, block in enumerate(blocks):
        place = f"{param}.{i}"
        if block.type == "text" or (turn.role == "user" and block.type in TEXT_BLOCKS):
            texts += _texts_of(block, place)
        elif block.type == "tool_result" and turn.role == "user":
            # The results of calls must directly follow the calls.
            num_results += 1
            yield _result_of(block, place)
        elif block.type == "tool_use" and turn.role == "assistant":
            name = _needed(block.name, f"{place}.name")
            calls.append(call_for_template(block.id, name, block.input))
        elif block.type == "thinking" and turn.role == "assistant":
            thoughts.append(_needed(block.thinking, f"{place}.thinking"))
        elif block.type != "redacted_thinking":
            raise not_offered(block.type, place)
    if len(calls) > MAX_CALLS:
        raise InvalidParameterError(
            f"{param} has {len(calls)} calls; at most {MAX_CALLS} are allowed", param
        )
    if texts or calls or thoughts or not num_results:
        yield message(turn.role, texts, reasoning="\n".join(thoughts), calls=calls)


def _result_of(block: _Block, param: str) -> dict[str, Any]:
    call_id = _needed(block.tool_use_id, f"{param}.tool_use_id")
    texts: list[str] = []
    data, place = bytes(block.content), f"{param}.content"
    if data.startswith(b"["):
        check_num_strings(data, STRINGS_PER_PART * MAX_PARTS, place)
        parts = decode(data, list[_Block], place)
        if len(parts) > MAX_PARTS:
            raise InvalidParameterError(
                f"{place} has {len(parts)} parts; at most {MAX_PARTS} are allowed", place
            )
        texts = [text for i, part in enumerate(parts) for text in _texts_of(part, f"{place}.{i}")]
    elif data not in _NOTHING:
        texts = [decode(data, str, place)]
    if block.is_error:  # chat templates have no field for errors
        texts = ["Error:", *texts]
    return message("tool", texts, call_id=call_id)


def _texts_of(block: _Block, param: str) -> list[str]:
    """Return the texts of a block that consists of text.

    Raises:
        InvalidParameterError: the block does not consist of text.
    """
    if block.type == "text":
        return [_needed(block.text, f"{param}.text")]
    if block.type == "tool_reference":
        return [_needed(block.tool_name, f"{param}.tool_name")]
    if block.type == "search_result":
        head = [block.title, decode(block.source, str | None, f"{param}.source")]
        body = read_texts(block.content, f"{param}.content", ("text",))
    elif block.type == "document":
        head = [block.title, block.context]
        source: _Source = decode(block.source, _Source, f"{param}.source")
        if source.type == "text":
            body = [_needed(source.data, f"{param}.source.data")]
        elif source.type == "content":
            body = read_texts(source.content, f"{param}.source.content", ("text",))
        else:
            raise not_offered(f"document with a source of type {source.type}", f"{param}.source")
    else:
        raise not_offered(block.type, param)
    return ["\n".join([*filter(None, head), *body])]


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise InvalidParameterError(f"{param} is missing", param)
    return value
