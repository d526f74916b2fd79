"""POST /v1/responses and POST /v1/responses/input_tokens; no response is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.formats.events import Content, Event
from dist_aclgraph.serve.openai import sse
from dist_aclgraph.serve.openai.body import note_ignored, read_body
from dist_aclgraph.serve.openai.conversation import Conversation, encode, open_conversation
from dist_aclgraph.serve.openai.errors import json_response, public_message
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.logprobs import chat_logprobs
from dist_aclgraph.serve.openai.reply import ReplyShape, reply
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.openai.types import MAX_PROMPT
from dist_aclgraph.serve.responses.input import Namespaces
from dist_aclgraph.serve.responses.output_items import OutputItems
from dist_aclgraph.serve.responses.types import ResponsesRequest
from dist_aclgraph.serve.resume.journal import Chance

Json = dict[str, Any]
# A comment of the stream, which clients ignore. This comment is sent while the generation continues
# without visible output.
NOTHING_YET = b": \n\n"


async def responses(state: ApiState, request: Request) -> Response:
    """Answer the items of a conversation; with ``stream``, by server-sent events."""

    def convert(body: ResponsesRequest) -> tuple[ResponsesRequest, Conversation, Namespaces]:
        state.admit(body.model)
        tools, namespaces, left_out = body.read_tools()
        note_ignored(request.scope, left_out)
        asked = body.asked(tools, state.sampling_defaults, state.context_len)
        return body, asked, namespaces

    body, asked, namespaces = await read_body(
        request, ResponsesRequest, convert, state.config.serve
    )
    found = await open_conversation(state, request.scope, asked)
    items = OutputItems(
        found.chance.name, namespaces, encodes_reasoning=body.wants_encoded_reasoning
    )
    shape = _ResponseReply(state, body, asked, found.chance, items)
    return await reply(request, found.generation, shape, stream=bool(body.stream))


async def input_tokens(state: ApiState, request: Request) -> Response:
    """The number of tokens of the prompt that is made from the items of a conversation."""

    def convert(body: ResponsesRequest) -> Conversation:
        state.admit(body.model)
        tools, _, left_out = body.read_tools()
        note_ignored(request.scope, left_out)
        asked = body.asked(tools, state.sampling_defaults, state.context_len)
        return replace(asked, most_prompt_tokens=max(state.context_len, MAX_PROMPT))

    asked = await read_body(request, ResponsesRequest, convert, state.config.serve)
    num_tokens = len(await encode(state, asked))
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


class _ResponseReply(ReplyShape):
    """Converts pieces of the answer to a response object."""

    def __init__(
        self,
        state: ApiState,
        body: ResponsesRequest,
        asked: Conversation,
        chance: Chance,
        items: OutputItems,
    ) -> None:
        self._state = state
        self._wants_logprobs = body.wants_logprobs
        self._common = _common(state, body, asked, chance)
        self._items = items
        self._logprobs: list[Json] = []  # log-probabilities of tokens whose text is held back
        self._num_frames = 0
        self._status = "in_progress"

    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        found = b""
        if not self._num_frames:
            found += self._frame({"type": "response.created", "response": self._response()})
            found += self._frame({"type": "response.in_progress", "response": self._response()})
        return (found + b"".join(map(self._frame, self._add(piece)))) or NOTHING_YET

    def last_frames(self, generation: Generation) -> bytes:
        body = self._response(generation.usage)
        return self._frame({"type": f"response.{self._status}", "response": body})

    def error_frames(self, generation: Generation, error: Exception) -> bytes:
        sse.log_failure(error)
        self._status = "failed"
        body = self._response()
        body["error"] = {"code": "server_error", "message": public_message(error)}
        return self._frame({"type": "response.failed", "response": body})

    def whole(self, generation: Generation, pieces: list[list[ChoicePiece]]) -> Json:
        for piece in pieces[0]:
            for _ in self._add(piece):
                pass
        return self._response(generation.usage)

    def _add(self, piece: ChoicePiece) -> Iterator[Json]:
        events: Iterable[Event] = piece.events
        if piece.text:
            events = [Content(piece.text)]
        if self._wants_logprobs:
            num_shown = len(piece.logprobs) - piece.has_end_token
            rows, texts = piece.logprobs[:num_shown], piece.token_texts[:num_shown]
            self._logprobs += chat_logprobs(self._state.tokenizer, rows, texts)["content"]
        yield from self._items.add(events, self._logprobs)
        if events:
            self._logprobs = []
        if piece.finish_reason is not None:
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"
            yield from self._items.end(self._status)

    def _response(self, usage: Usage | None = None) -> Json:
        is_cut = self._status == "incomplete"
        return {
            **self._common,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": None if usage is None else _usage(usage),
        }

    def _frame(self, event: Json) -> bytes:
        number = self._num_frames
        self._num_frames += 1
        return sse.named_frame(event["type"], {**event, "sequence_number": number})


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _common(state: ApiState, body: ResponsesRequest, asked: Conversation, chance: Chance) -> Json:
    """Return the fields of a response that do not depend on the answer."""
    return {
        "id": f"resp_{chance.name}",
        "object": "response",
        "created_at": chance.created_s,
        "model": state.config.name,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": _or(body.metadata, {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": _or(body.reasoning, {"effort": None, "summary": None}),
        "store": False,
        "temperature": asked.params.temperature,
        "text": {"format": _or(body.text_format, {"type": "text"})},
        "tool_choice": _or(body.tool_choice, "auto"),
        "tools": _or(body.tools, []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": asked.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _or(given: Raw, default: Any) -> Any:
    """Return the client's JSON value on one line; if there is no value, return the default. A line
    break would end the frame.
    """
    if bytes(given) in (b"", b"null"):
        return default
    return Raw(msgspec.json.format(bytes(given), indent=-1))
