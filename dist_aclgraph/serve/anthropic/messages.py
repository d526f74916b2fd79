"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dist_aclgraph.formats.events import Content, Event
from dist_aclgraph.serve.anthropic.blocks import Blocks
from dist_aclgraph.serve.anthropic.types import CountTokensRequest, MessagesRequest
from dist_aclgraph.serve.openai import sse
from dist_aclgraph.serve.openai.body import note_ignored, read_body
from dist_aclgraph.serve.openai.conversation import Conversation, encode, open_conversation
from dist_aclgraph.serve.openai.errors import (
    anthropic_error_body,
    json_response,
    public_message,
    status_of,
)
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation, Usage
from dist_aclgraph.serve.openai.reply import ReplyShape, reply
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.journal import Chance

Json = dict[str, Any]


async def messages(state: ApiState, request: Request) -> Response:
    """Answer messages in the form of Anthropic's API; with ``stream``, by server-sent events."""

    def convert(body: MessagesRequest) -> tuple[bool, Conversation]:
        state.admit(body.model)
        tools, left_out = body.read_tools()
        note_ignored(request.scope, left_out)
        asked = body.conversation(tools, state.sampling_defaults, state.context_len)
        return bool(body.stream), asked

    stream, asked = await read_body(request, MessagesRequest, convert, state.config.serve)
    found = await open_conversation(state, request.scope, asked)
    shape = _MessageReply(state.config.name, asked.params.max_tokens, found.chance)
    return await reply(request, found.generation, shape, stream=stream)


async def count_tokens(state: ApiState, request: Request) -> Response:
    """The number of tokens of the prompt that is made from the messages."""

    def convert(body: CountTokensRequest) -> Conversation:
        state.admit(body.model)
        tools, left_out = body.read_tools()
        note_ignored(request.scope, left_out)
        return body.counted(tools, state.context_len)

    asked = await read_body(request, CountTokensRequest, convert, state.config.serve)
    return json_response({"input_tokens": len(await encode(state, asked))})


class _MessageReply(ReplyShape):
    """Converts pieces of the answer to a message object.

    Args:
        max_tokens: the client's limit; the context may allow fewer tokens.
    """

    shows_usage_so_far = True

    def __init__(self, model: str, max_tokens: int | None, chance: Chance) -> None:
        self._common = {
            "id": f"msg_{chance.name}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._max_tokens = max_tokens
        self._blocks = Blocks(chance.name)
        self._is_begun = False
        self._finish_reason: str | None = None
        # the stop string or stop token that has ended the answer
        self._stop: int | str | None = None

    def frames(self, usage: Usage | None, piece: ChoicePiece) -> bytes:
        events: list[Json] = []
        if not self._is_begun:
            self._is_begun = True
            assert usage is not None
            begun = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
            message = self._message([], None, None, begun)
            events.append({"type": "message_start", "message": message})
        events += self._add(piece)
        # Send each piece, even without text, to show the client that the generation continues.
        return b"".join(map(_frame, events or [{"type": "ping"}]))

    def last_frames(self, generation: Generation) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": self._reason(generation), "stop_sequence": self._stop},
            "usage": usage_of(generation.usage),
        }
        return _frame(delta) + _frame({"type": "message_stop"})

    def error_frames(self, generation: Generation, error: Exception) -> bytes:
        sse.log_failure(error)
        return _frame(anthropic_error_body(status_of(error), public_message(error)))

    def whole(self, generation: Generation, pieces: list[list[ChoicePiece]]) -> Json:
        for piece in pieces[0]:
            for _ in self._add(piece):
                pass
        reason = self._reason(generation)
        return self._message(self._blocks.blocks, reason, self._stop, generation.usage)

    def _add(self, piece: ChoicePiece) -> Iterator[Json]:
        events: Iterable[Event] = [Content(piece.text)] if piece.text else piece.events
        yield from self._blocks.add(events)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            yield from self._blocks.close()
            self._stop = None if self._blocks.has_calls else piece.stop_reason

    def _reason(self, generation: Generation) -> str:
        """Return the reason why the answer has ended."""
        if self._finish_reason == "length":
            is_ours = generation.params[0].max_tokens != self._max_tokens
            return "model_context_window_exceeded" if is_ours else "max_tokens"
        if self._stop is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.has_calls else "end_turn"

    def _message(
        self, content: list[Json], reason: str | None, stop: int | str | None, usage: Usage
    ) -> Json:
        return {
            **self._common,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage_of(usage),
        }


def usage_of(usage: Usage) -> Json:
    """Return the token counts; prompt tokens from the prefix cache have a separate count."""
    found: Json = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return found


def _frame(event: Json) -> bytes:
    return sse.named_frame(event["type"], event)
